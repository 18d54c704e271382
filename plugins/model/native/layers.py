"""The arithmetic of one decoder layer over ragged tokens, and its parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phloem.interfaces import AttentionStep

from .config import Arch
from .linear import Linear
from .packed import Gemm, PackedLinear
from .weights import Weights


class Layer:
    """One decoder layer. Holds packed parameters: q, k, v in one matrix, gate and up in another."""

    def __init__(self, arch: Arch, index: int, weights: Weights) -> None:
        """Allocates the parameters in `weights`, which fills them later."""
        self.index = index
        self.window = arch.layers[index].window
        self.eps = arch.norm_eps
        self.scale = arch.scale
        self.heads, self.kv_heads, self.head_dim = arch.heads, arch.kv_heads, arch.head_dim
        self.intermediate = arch.intermediate
        self.gelu = arch.activation == "gelu_pytorch_tanh"
        prefix = f"model.layers.{index}."
        build = _Builder(arch, weights, prefix)
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.qkv = build.linear("self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}, arch.hidden)
        self.out = build.linear("self_attn", {"o_proj": arch.hidden}, q)
        gate_up = {"gate_proj": arch.intermediate, "up_proj": arch.intermediate}
        self.gate_up = build.linear("mlp", gate_up, arch.hidden)
        self.down = build.linear("mlp", {"down_proj": arch.hidden}, arch.intermediate)
        self.attention_norm = build.norm("input_layernorm")
        sandwich = arch.family.sandwich
        self.mlp_norm = build.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        self.after_attention = build.norm("post_attention_layernorm") if sandwich else None
        self.after_mlp = build.norm("post_feedforward_layernorm") if sandwich else None
        self.q_norm = build.head_norm("q_norm") if arch.family.qk_norm else None
        self.k_norm = build.head_norm("k_norm") if arch.family.qk_norm else None
        self.head_norms: torch.Tensor | None = None

    def finish(self) -> None:
        """Called once the weights are filled: one [Hq + Hkv, D] table norms queries and keys in a single pass."""
        if self.q_norm is not None and self.k_norm is not None:
            rows = [self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1)]
            self.head_norms = torch.cat(rows)

    def pack(self, gemm: Gemm) -> None:
        """Take packed matrices in place of the torch ones, one at a time: memory holds one of them twice."""
        self.qkv = PackedLinear(gemm, self.qkv)
        self.out = PackedLinear(gemm, self.out)
        self.gate_up = PackedLinear(gemm, self.gate_up)
        self.down = PackedLinear(gemm, self.down)

    def __call__(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: AttentionStep) -> torch.Tensor:
        """h [T, hidden] -> [T, hidden], in place. cos, sin [T, 1, D] as `rotate` wants them."""
        attended = self._attention(F.rms_norm(h, h.shape[1:], self.attention_norm, self.eps), cos, sin, attend)
        h = self._add(h, self.out, attended, self.after_attention)
        return self._add(h, self.down, self._gated(F.rms_norm(h, h.shape[1:], self.mlp_norm, self.eps)), self.after_mlp)

    def _attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: AttentionStep) -> torch.Tensor:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.head_norms is not None:
            qk = F.rms_norm(qk, (dim,), None, self.eps) * self.head_norms
        qk = rotate(qk, cos, sin)
        out = attend(self.index, qk[:, :heads], qk[:, heads:], v, scale=self.scale, window=self.window)
        return out.reshape(x.shape[0], heads * dim)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.split(self.gate_up(x), self.intermediate, dim=1)
        return (F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)).mul_(up)

    def _add(self, h: torch.Tensor, linear: Linear, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return linear.add_to(h, x)
        return h.add_(F.rms_norm(linear(x), h.shape[1:], norm, self.eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [T, H, D]. cos, sin [T, 1, D], the first half of sin negated."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class _Builder:
    """Names and shapes of a layer's parameters, in Hugging Face's terms."""

    def __init__(self, arch: Arch, weights: Weights, prefix: str) -> None:
        self._arch = arch
        self._weights = weights
        self._prefix = prefix

    def linear(self, block: str, parts: dict[str, int], columns: int) -> Linear:
        """A packed projection; biases exist where the architecture has them for all its parts."""
        names = {f"{self._prefix}{block}.{name}": rows for name, rows in parts.items()}
        weight = self._weights.matrix({f"{name}.weight": rows for name, rows in names.items()}, columns)
        if not self._arch.biases.issuperset(parts):
            return Linear(weight)
        return Linear(weight, self._weights.vector({f"{name}.bias": rows for name, rows in names.items()}))

    def norm(self, name: str) -> torch.Tensor:
        """An RMS norm's weight, [hidden]."""
        return self._weights.vector({f"{self._prefix}{name}.weight": self._arch.hidden}, self._arch.family.norm_offset)

    def head_norm(self, name: str) -> torch.Tensor:
        """An RMS norm's weight over one head, [head_dim]."""
        parts = {f"{self._prefix}self_attn.{name}.weight": self._arch.head_dim}
        return self._weights.vector(parts, self._arch.family.norm_offset)
