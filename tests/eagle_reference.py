"""An EAGLE-3 head in plain torch, written from the paper (arXiv:2503.01840), one entry after another; for tests only.

Heads count positions as their texts do: the *entry* of token i is made from the target's features of token i - 1 and
from the embedding of token i, and it predicts token i + 1. So the entry lies where token i does, and token 0 has none.
While drafting the features are not there: the output of the head's own layer for token i stands in for the fused
features of token i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Past:
    """A text and what the head has made of it; never changed, so that a tree may branch from it."""

    keys: torch.Tensor  # [entries, kv heads, head dim], rotated
    values: torch.Tensor  # [entries, kv heads, head dim]
    length: int  # tokens of the text: the next entry's position
    hidden: torch.Tensor  # [hidden]: the layer's output for the last token, before the last norm
    logits: torch.Tensor  # [draft vocab]: of what follows the last token


class ReferenceEagle3:
    """`config` is the head's config.json, `tensors` its weights, `embed` the target's embedding [vocab, hidden]."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, embed: torch.Tensor) -> None:
        self.config = config
        self.tensors = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.embed = self.tensors.get("embed_tokens.weight", embed.float())

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """tokens [T], features [T, layers * hidden] of the same tokens -> [T, draft vocab].

        Row i is of the entry of token i, made from features[i - 1] and tokens[i], and predicts token i + 1. Row 0 is
        not a number, for token 0 has no entry; features[T - 1] are not read.
        """
        rows = [torch.full_like(self.tensors["lm_head.weight"][:, 0], torch.nan)]
        rows += [past.logits for past in self._entries(tokens, features)]
        return torch.stack(rows)

    @torch.inference_mode()
    def start(self, tokens: torch.Tensor, features: torch.Tensor) -> Past:
        """After the text of `tokens` [T > 1], all of whose entries are made from the target's features."""
        return self._entries(tokens, features)[-1]

    @torch.inference_mode()
    def step(self, past: Past, token: int) -> Past:
        """After one drafted token more, whose entry is made from the layer's own output for the token before."""
        return self._entry(past, past.hidden, token)

    def _entries(self, tokens: torch.Tensor, features: torch.Tensor) -> list[Past]:
        none = torch.zeros(0, self.config["num_key_value_heads"], self.config["head_dim"])
        past, made = Past(none, none, 1, torch.zeros(0), torch.zeros(0)), []
        for i in range(1, len(tokens)):
            past = self._entry(past, self._linear("fc", features[i - 1].float()), int(tokens[i]))
            made.append(past)
        return made

    def _entry(self, past: Past, hidden: torch.Tensor, token: int) -> Past:
        """`hidden` [hidden] stands for the token before `token`."""
        normed = self._norm("midlayer.hidden_norm", hidden)
        residual = normed if self.config.get("norm_before_residual") else hidden
        both = torch.cat([self._norm("midlayer.input_layernorm", self.embed[token]), normed])
        width = self.config["head_dim"]
        q, k, v = (self._linear(f"midlayer.self_attn.{name}_proj", both).view(-1, width) for name in "qkv")
        q, k = self._rotated(q, past.length), self._rotated(k, past.length)
        keys, values = torch.cat([past.keys, k[None]]), torch.cat([past.values, v[None]])
        heads = [self._attend(row, keys, values, head) for head, row in enumerate(q)]
        h = residual + self._linear("midlayer.self_attn.o_proj", torch.cat(heads))
        normed = self._norm("midlayer.post_attention_layernorm", h)
        gate, up = self._linear("midlayer.mlp.gate_proj", normed), self._linear("midlayer.mlp.up_proj", normed)
        h = h + self._linear("midlayer.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        return Past(keys, values, past.length + 1, h, self._linear("lm_head", self._norm("norm", h)))

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, head: int) -> torch.Tensor:
        """[head dim] of one query head over all entries so far, its own included."""
        group = head * self.config["num_key_value_heads"] // self.config["num_attention_heads"]
        weights = (keys[:, group] @ q / q.shape[0] ** 0.5).softmax(0)
        return weights @ values[:, group]

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [heads, head dim]: the first half of a head is paired with its second."""
        half = x.shape[1] // 2
        angles = position * self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """By the root of the mean square."""
        scale = (x.pow(2).mean() + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias")
        product = self.tensors[f"{name}.weight"] @ x
        return product if bias is None else product + bias
