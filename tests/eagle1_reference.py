"""The first EAGLE's head in plain torch, written from the paper (arXiv:2401.15077), one entry after another; for tests.

Token i's entry is made from the embedding of token i and the target's last hidden state of token i - 1, fused to one
vector, and predicts token i + 1 through the target's own head; token 0 has none. While drafting the head's output for
token i stands in for the target's state of token i. The one layer has no norm before its attention, unless the
checkpoint brings one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class ReferenceEagle1:
    """`config` and `tensors` of a head as SpecForge names them, `embed` and `unembed` [vocab, hidden] of the target."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], embed: torch.Tensor, unembed: torch.Tensor
    ) -> None:
        self.config, self.tensors, self.embed, self.unembed = config, tensors, embed, unembed

    @torch.inference_mode()
    def logits(self, tokens: list[int], states: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """[vocab] of what follows `drafted`, which follows `tokens` [T]; `states` [T, hidden] are the target's."""
        known = [*states[: len(tokens) - 1].unbind(0)]
        inputs: list[torch.Tensor] = []
        for i, token in enumerate([*tokens, *drafted][1:], 1):
            inputs.append(self._linear("fc", torch.cat([self.embed[token], known[i - 1]])))
            if i >= len(tokens) - 1:  # the first of which nobody has told the state
                known.append(self._last(torch.stack(inputs)))
        return self.unembed @ known[-1]

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        """Entries [N, hidden] -> the layer's output [hidden] for the last of them."""
        normed = torch.stack([self._norm("midlayer.input_layernorm", row) for row in x])
        width, heads, kv = (self.config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        keys, values = (
            torch.stack([self._linear(f"midlayer.self_attn.{name}_proj", row) for row in normed]).view(
                len(x), kv, width
            )
            for name in "kv"
        )
        query = self._linear("midlayer.self_attn.q_proj", normed[-1]).view(heads, width)
        rows = []
        for head in range(heads):
            own = torch.stack([self._rotated(key[head * kv // heads], i + 1) for i, key in enumerate(keys)])
            scores = own @ self._rotated(query[head], len(x)) / width**0.5
            rows.append(scores.softmax(0) @ values[:, head * kv // heads])
        h = x[-1] + self._linear("midlayer.self_attn.o_proj", torch.cat(rows))
        normed_h = self._norm("midlayer.post_attention_layernorm", h)
        gate = torch.nn.functional.silu(self._linear("midlayer.mlp.gate_proj", normed_h))
        return h + self._linear("midlayer.mlp.down_proj", gate * self._linear("midlayer.mlp.up_proj", normed_h))

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [head_dim] as complex numbers, of its first half and its second, turned."""
        half = len(x) // 2
        speed = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[:half].double(), x[half:].double()) * torch.polar(
            torch.ones_like(speed), position * speed
        )
        return torch.cat([turned.real, turned.imag]).float()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else x / (x.pow(2).mean() + self.config["rms_norm_eps"]).sqrt() * weight

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", torch.zeros(()))
