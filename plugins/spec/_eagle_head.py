"""The arithmetic of an EAGLE head: what a token's entry is, and what the head's one layer makes of it.

EAGLE-3: Li et al., arXiv:2503.01840. States of several layers of the target are fused to one feature; the layer reads
the normed embedding and the normed feature beside each other, and its output is the feature while drafting. EAGLE: Li
et al., arXiv:2401.15077. Embedding and the target's last states are fused to the layer's input, and the output stands
for such states, so that the target's own head reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from phloem.interfaces import LendsParts, Model

from ._eagle_checkpoint import Checkpoint

Product = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin of positions, [T, 1, head_dim], the first half of sin negated


class Head:
    """All in the model's dtype. T tokens, h the hidden size; a feature is [h], whichever the algorithm."""

    def __init__(self, checkpoint: Checkpoint, model: Model, device: torch.device) -> None:
        """`checkpoint` is in the model's dtype on its device. Matrices are multiplied by the model's own kernel."""
        self.shape = shape = checkpoint.shape
        self.fused = shape.algorithm == "eagle3"
        lends, own = cast(LendsParts, model), checkpoint.tensors
        self._norms = {name: tensor for name, tensor in own.items() if name.endswith("norm.weight")}

        def product(*names: str) -> Product:
            weight = torch.cat([own[f"{name}.weight"] for name in names])
            rows = [own.get(f"{name}.bias") for name in names]
            if all(row is None for row in rows):
                return lends.product(weight)
            zeros = [weight.new_zeros(own[f"{name}.weight"].shape[0]) for name in names]
            return lends.product(
                weight, torch.cat([z if row is None else row for row, z in zip(rows, zeros, strict=True)])
            )

        self._fc = product("fc")
        self._q, self._kv = product("self_attn.q_proj"), product("self_attn.k_proj", "self_attn.v_proj")
        self._out = product("self_attn.o_proj")
        self._gate_up, self._down = product("mlp.gate_proj", "mlp.up_proj"), product("mlp.down_proj")
        self._logits: Product = product("lm_head") if self.fused else model.logits
        embedding = own.get("embed_tokens.weight")
        self._embed: Product = lends.embed if embedding is None else lambda tokens: F.embedding(tokens, embedding)
        self._frequencies = shape.inverse_frequencies().to(device)
        self._dtype = own["fc.weight"].dtype

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """What is kept of tokens: states [T, layers, h] -> [T, h]."""
        flat = states.flatten(1).to(self._dtype)
        return self._fc(flat) if self.fused else flat

    def turn(self, positions: torch.Tensor) -> Turn:
        """The rotation of positions [T]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], 1)[:, None], torch.cat([-sin, sin], 1)[:, None]
        return cos.to(self._dtype), sin.to(self._dtype)

    def entries(self, tokens: torch.Tensor, features: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, kv_heads, head_dim] of tokens [T], `features` [T, h] being those of the tokens before them."""
        _, inputs = self._inputs(tokens, features)
        return self._keys(inputs, turn)

    def step(self, tokens: torch.Tensor, features: torch.Tensor, turn: Turn, attend: Attend) -> torch.Tensor:
        """The layer's output [T, h]: the features that stand for these tokens while drafting. `attend(q, k, v)`."""
        residual, inputs = self._inputs(tokens, features)
        keys, values = self._keys(inputs, turn)
        queries = _rotate(self._q(inputs).view(len(tokens), self.shape.heads, -1), turn)
        h = residual + self._out(attend(queries, keys, values).reshape(len(tokens), -1))
        gate, up = self._gate_up(self._norm(h, "post_attention_layernorm")).chunk(2, 1)
        return h + self._down(F.silu(gate) * up)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Of what follows, float32 [T, draft vocab], from the layer's output [T, h]."""
        return self._logits(self._norm(features, "norm") if self.fused else features).float()

    def _inputs(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual [T, h], and what the projections read, [T, 2h] or [T, h]."""
        words, features = self._embed(tokens).to(self._dtype), features.to(self._dtype)
        if self.fused:
            normed = self._norm(features, "hidden_norm")
            inputs = torch.cat([self._norm(words, "input_layernorm"), normed], 1)
            return (normed if self.shape.norm_before_residual else features), inputs
        x = self._fc(torch.cat([words, features], 1))
        return x, (self._norm(x, "input_layernorm") if "input_layernorm.weight" in self._norms else x)

    def _keys(self, inputs: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._kv(inputs).view(len(inputs), 2 * self.shape.kv_heads, self.shape.head_dim)
        keys, values = both.chunk(2, 1)
        return _rotate(keys, turn), values

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[1:], self._norms[f"{name}.weight"], self.shape.eps)


def _rotate(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [T, H, D]."""
    cos, sin = turn
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
