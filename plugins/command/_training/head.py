"""The head as it is trained: EAGLE-3 (Li et al., arXiv:2503.01840) with its training-time test.

Row i of a text of tokens t_0, t_1, ... begins as the entry made from the target's states of t_i and the embedding of
t_(i+1), which predicts t_(i+2). At step k of the test the same row is what drafting has come to k tokens later: the
layer's own output of step k - 1 stands for the states of t_(i+k), the token is t_(i+1+k), and t_(i+2+k) is predicted.
It sees the entries of step 0 up to its own row, and of the later steps its own row's only, as a draft sees the text's
entries and its own path. Only rows from which something is drafted are unrolled; of the others the entries are enough.
Parameters are named as in the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # keys and values, or cos and sin
_BLOCK, _PART = 128, 64  # rows of a product, and of a text in attention, come in multiples of them


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


class Linear(nn.Linear):
    """Without bias. Rows of zeros fill the last block, and are cut off again: neither results nor gradients change.

    Each batch has another number of rows, and on CPUs oneDNN compiles a bfloat16 product for each shape, of up to 5 MB,
    and keeps a thousand of them: without blocks a long run grows by gigabytes. Attention has its own.
    """

    def __init__(self, width: int, to: int) -> None:
        super().__init__(width, to, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., to]"""
        rows = x.flatten(0, -2)
        whole = F.linear(_filled(rows, _BLOCK), self.weight)
        return whole[: len(rows)].view(*x.shape[:-1], self.out_features)


@dataclass
class View:
    """What the unrolled rows of a batch see. L tokens a text, R rows; grows by `own` at every step but the first. Here
    L and R are whole parts: nobody sees the entries that fill up the last one, and nobody reads what its rows see.
    """

    text: Pair  # keys and values [B, kv heads, L, D] of step 0
    shut: Tensor  # [B, R, L] bool: what lies behind a row
    at: Tensor  # [B, rows] where the rows stand in their texts, without what fills up
    own: list[Pair]  # of later steps: [B, kv heads, R, D], each for its own row


class SelfAttention(nn.Module):
    """Reads embedding and hidden state side by side; grouped queries, rotary positions."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._width, self._group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        across, down = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(2 * shape.hidden_size, across)
        self.k_proj = Linear(2 * shape.hidden_size, down)
        self.v_proj = Linear(2 * shape.hidden_size, down)
        self.o_proj = Linear(across, shape.hidden_size)

    def entries(self, x: Tensor, rotation: Pair) -> Pair:
        """x [B, N, 2 * hidden] -> keys and values [B, kv heads, N, D]."""
        return _rotated(self._split(self.k_proj(x)), rotation), self._split(self.v_proj(x))

    def forward(self, x: Tensor, rotation: Pair, view: View) -> Tensor:
        """x [B, R, 2 * hidden] -> [B, R, hidden].

        The heads that share a key lie side by side as rows, and the two softmaxes are joined by their sums: each of the
        large [R, L] tensors costs more time than the products.
        """
        q = _filled(_rotated(self._split(self.q_proj(x)), rotation) * self._width**-0.5, _PART)
        batch, rows, (keys, values) = len(q), q.shape[2], view.text
        grouped = q.reshape(batch, -1, self._group * rows, self._width)
        shut = view.shut.repeat(1, self._group, 1)[:, None]
        scores = (grouped @ keys.transpose(2, 3)).masked_fill(shut, -torch.inf)
        highest = scores.detach().amax(-1, keepdim=True)
        if view.own:
            apart = grouped.view(batch, -1, self._group, rows, self._width)
            own = torch.stack([(apart * k[:, :, None]).sum(-1).flatten(2) for k, _ in view.own], -1)
            highest = torch.maximum(highest, own.detach().amax(-1, keepdim=True))
        weights = (scores - highest).exp()
        mixed, total = weights @ values, weights.sum(-1, keepdim=True)
        for i, (_, v) in enumerate(view.own):
            weight = (own[..., i, None] - highest).exp()
            mixed, total = mixed + weight * v.repeat(1, 1, self._group, 1), total + weight
        whole = (mixed / total).view(batch, -1, rows, self._width)[:, :, : x.shape[1]]
        joined: Tensor = self.o_proj(whole.transpose(1, 2).flatten(2))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._width).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

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

    def inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Both [..., hidden] -> [..., 2 * hidden]"""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def forward(self, inputs: Tensor, hidden: Tensor, rotation: Pair, view: View) -> Tensor:
        """inputs [B, R, 2 * hidden], hidden [B, R, hidden] -> [B, R, hidden], before the last norm."""
        hidden = hidden + self.self_attn(inputs, rotation, view)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class EagleHead(nn.Module):
    """The parameters of a head, and one step of the test."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(shape.features * shape.hidden_size, shape.hidden_size)
        self.midlayer = Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = Linear(shape.hidden_size, shape.draft_vocab_size)

    def read(self, hidden: Tensor, embedding: Tensor, at: Tensor) -> View:
        """What the rows `at` [B, R] see of texts, of which hidden [B, L, hidden] is `fc` of the features, and embedding
        [B, L, hidden] that of the tokens one further.
        """
        where = torch.arange(hidden.shape[1], device=hidden.device)
        rotation = rotations(self.shape, where)
        keys, values = self.midlayer.self_attn.entries(self.midlayer.inputs(embedding, hidden), rotation)
        text = _filled(keys, _PART), _filled(values, _PART)
        last = _filled(at.clamp(max=len(where) - 1)[..., None], _PART)
        return View(text, torch.arange(text[0].shape[2], device=at.device) > last, at, [])

    def step(self, k: int, hidden: Tensor, embedding: Tensor, view: View) -> Tensor:
        """The layer's output [B, R, hidden] at step k, which is the next one's `hidden`; at step 0 that is `fc`'s."""
        inputs, rotation = self.midlayer.inputs(embedding, hidden), rotations(self.shape, view.at + k)
        if k > 0:
            keys, values = self.midlayer.self_attn.entries(inputs, rotation)
            view.own.append((_filled(keys, _PART), _filled(values, _PART)))
        output: Tensor = self.midlayer(inputs, hidden, rotation, view)
        return output

    def logits(self, output: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocab]"""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores


def _filled(x: Tensor, block: int) -> Tensor:
    """[..., n, width] -> the same with rows of zeros up to a multiple of `block`."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % block))


def rotations(shape: HeadShape, at: Tensor) -> Pair:
    """cos and sin [..., rows, head dim / 2] of positions [..., rows], for tensors [B, heads, rows, D]."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=at.device) / half)
    angles = at[..., None] * frequencies
    if angles.dim() == 3:
        angles = angles[:, None]  # the same for all heads of a text
    return angles.cos().float(), angles.sin().float()


def _rotated(x: Tensor, rotation: Pair) -> Tensor:
    """x [B, heads, L, D]: the first half of a head is paired with its second."""
    cos, sin = rotation[0].to(x.dtype), rotation[1].to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
