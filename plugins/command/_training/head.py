"""The head as it is trained: EAGLE-3 (Li et al., arXiv:2503.01840) with its training-time test.

Row i of a text of tokens t_0, t_1, ... begins as the entry made from the target's states of t_i and the embedding of
t_(i+1), which predicts t_(i+2). At step k of the test the same row is what drafting has come to k tokens later: the
layer's own output of step k - 1 stands for the states of t_(i+k), the token is t_(i+1+k), and t_(i+2+k) is predicted.
It sees the entries of step 0 up to its own row, and of the later steps its own row's only, as a draft sees the text's
entries and its own path. Parameters are named as in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # keys and values, or cos and sin


@dataclass(frozen=True)
class HeadShape:
    """Sizes, named as in config.json; `features` counts the target's layers that are read."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    features: int
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5


class Norm(nn.Module):
    """By the root of the mean square, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in any float type -> the same."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Reads embedding and hidden state side by side; grouped queries, rotary positions."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._width, self._group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        across, down = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, across, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, down, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, down, bias=False)
        self.o_proj = nn.Linear(across, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Pair, past: list[Pair]) -> Tensor:
        """x [B, L, 2 * hidden] -> [B, L, hidden]. `past`: keys and values of earlier steps; these are appended."""
        q, k, v = (self._split(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotated(q, rotation), _rotated(k, rotation)
        k, v = (each.repeat_interleave(self._group, 1) for each in (k, v))
        past.append((k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(past) == 1 else self._unrolled(q, past)
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return joined

    def _unrolled(self, q: Tensor, past: Sequence[Pair]) -> Tensor:
        """[B, heads, L, D]: over all of step 0 up to the own row, and of each later step the own row."""
        (first, values), later = past[0], past[1:]
        rows = q.shape[2]
        q = q * self._width**-0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ first.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        own = torch.stack([(q * k).sum(-1) for k, _ in later], -1)
        weights = torch.cat([scores, own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weights[..., :rows] @ values
        for i, (_, v) in enumerate(later):
            mixed = mixed + weights[..., rows + i, None] * v
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._width).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        product: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return product


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Norm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = SelfAttention(shape), Mlp(shape)

    def forward(self, embedding: Tensor, hidden: Tensor, rotation: Pair, past: list[Pair]) -> Tensor:
        """Both [B, L, hidden] -> [B, L, hidden], before the last norm."""
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, rotation, past)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class EagleHead(nn.Module):
    """The parameters of a head, and one step of the test."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.features * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    def step(self, hidden: Tensor, embedding: Tensor, past: list[Pair]) -> Tensor:
        """hidden [B, L, hidden]: `fc` of the features, later the step before; the layer's output, the next one's input.

        `past` is an empty list at step 0, and grows by each step's keys and values.
        """
        rotation = rotations(self.shape, hidden.shape[1], len(past), hidden.device)
        output: Tensor = self.midlayer(embedding, hidden, rotation, past)
        return output

    def logits(self, output: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocab]"""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores


def rotations(shape: HeadShape, rows: int, step: int, device: torch.device) -> Pair:
    """cos and sin [rows, head dim / 2] of step `step`: row i stands at position i + step."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = (torch.arange(rows, device=device) + step)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _rotated(x: Tensor, rotation: Pair) -> Tensor:
    """x [B, heads, L, D]: the first half of a head is paired with its second."""
    cos, sin = rotation[0].to(x.dtype), rotation[1].to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
