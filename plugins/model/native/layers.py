"""The arithmetic of one decoder layer over ragged tokens, and its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from phloem.interfaces import AttentionStep
from phloem.states import StateStep

from .config import Arch
from .linear import Linear
from .packed import Gemm, PackedLinear
from .rope import Rope
from .short_conv import ConvStep
from .ssd import ScanStep
from .weights import Weights


@dataclass(slots=True)
class Step:
    """What the layers of one forward pass need besides hidden states."""

    attend: AttentionStep
    rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]]  # cos and sin, [T, 1, D], as `rotate` wants them
    states: StateStep | None = None  # with recurrent layers
    conv: ConvStep | None = None
    scan: ScanStep | None = None


class Block(ABC):
    """One layer of the decoder."""

    @abstractmethod
    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, hidden] -> [T, hidden], in place where it can be."""

    @abstractmethod
    def pack(self, gemm: Gemm) -> None:
        """Take packed matrices in place of the torch ones, one at a time: memory holds one of them twice."""

    def finish(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called once the weights are filled."""


class Layer(Block):
    """A layer of two parts: what it mixes tokens by, which is a subclass's, and a gated MLP.

    Matrices are packed: gate and up are one, as are all that read the same input.
    """

    def __init__(self, arch: Arch, index: int, weights: Weights) -> None:
        """Allocates the parameters in `weights`, which fills them later. `index` counts all layers."""
        self.eps = arch.norm_eps
        self.intermediate = arch.intermediate
        self.gelu = arch.activation == "gelu_pytorch_tanh"
        self.build = build = Builder(arch, weights, f"{arch.family.root}.layers.{index}.")
        gate_up = {"gate_proj": arch.intermediate, "up_proj": arch.intermediate}
        self.gate_up = build.linear("mlp", gate_up, arch.hidden)
        self.down = build.linear("mlp", {"down_proj": arch.hidden}, arch.intermediate)
        self.mixer_norm = build.norm("input_layernorm")
        sandwich = arch.family.sandwich
        self.mlp_norm = build.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        self.after_mixer = build.norm("post_attention_layernorm") if sandwich else None
        self.after_mlp = build.norm("post_feedforward_layernorm") if sandwich else None
        self.out: Linear

    def pack(self, gemm: Gemm) -> None:
        """See `Block.pack`."""
        self.out = PackedLinear(gemm, self.out)
        self.gate_up = PackedLinear(gemm, self.gate_up)
        self.down = PackedLinear(gemm, self.down)

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """In place."""
        mixed = self.mix(F.rms_norm(h, h.shape[1:], self.mixer_norm, self.eps), step)
        h = self._add(h, self.out, mixed, self.after_mixer)
        return self._add(h, self.down, self._gated(F.rms_norm(h, h.shape[1:], self.mlp_norm, self.eps)), self.after_mlp)

    @abstractmethod
    def mix(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Normed x [T, hidden] -> what the output projection reads, [T, *]: here tokens meet those before them."""

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.split(self.gate_up(x), self.intermediate, dim=1)
        return (F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)).mul_(up)

    def _add(self, h: torch.Tensor, linear: Linear, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is None:
            return linear.add_to(h, x)
        return h.add_(F.rms_norm(linear(x), h.shape[1:], norm, self.eps))


class AttentionLayer(Layer):
    """A layer that attends. Queries, keys and values are one matrix."""

    def __init__(self, arch: Arch, index: int, weights: Weights, attending: int) -> None:
        """`attending` counts the layers that attend."""
        super().__init__(arch, index, weights)
        self.attending = attending
        self.window, self.rope = arch.layers[index].window, arch.layers[index].rope
        self.scale = arch.scale
        self.heads, self.kv_heads, self.head_dim = arch.heads, arch.kv_heads, arch.head_dim
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.qkv = self.build.linear("self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}, arch.hidden)
        self.out = self.build.linear("self_attn", {"o_proj": arch.hidden}, q)
        self.q_norm = self.build.head_norm("q_norm") if arch.family.qk_norm else None
        self.k_norm = self.build.head_norm("k_norm") if arch.family.qk_norm else None
        self.head_norms: torch.Tensor | None = None

    def finish(self) -> None:
        """One [Hq + Hkv, D] table norms queries and keys in a single pass."""
        if self.q_norm is not None and self.k_norm is not None:
            rows = [self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1)]
            self.head_norms = torch.cat(rows)

    def pack(self, gemm: Gemm) -> None:
        """See `Layer.pack`."""
        self.qkv = PackedLinear(gemm, self.qkv)
        super().pack(gemm)

    def mix(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention, [T, heads * head_dim]."""
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        assert self.rope is not None, "a layer that attends has a rotation"
        cos, sin = step.rotations[self.rope]
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.head_norms is not None:
            qk = F.rms_norm(qk, (dim,), None, self.eps) * self.head_norms
        qk = rotate(qk, cos, sin)
        out = step.attend(self.attending, qk[:, :heads], qk[:, heads:], v, scale=self.scale, window=self.window)
        return out.reshape(x.shape[0], heads * dim)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [T, H, D]. cos, sin [T, 1, D], the first half of sin negated."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class Builder:
    """Names and shapes of a layer's parameters, in Hugging Face's terms."""

    def __init__(self, arch: Arch, weights: Weights, prefix: str) -> None:
        self._arch = arch
        self._weights = weights
        self._prefix = prefix

    def linear(self, block: str, parts: dict[str, int], columns: int) -> Linear:
        """A packed projection; biases exist where the architecture has them for all its parts."""
        names = {self.named(f"{block}.{name}"): rows for name, rows in parts.items()}
        weight = self._weights.matrix({f"{name}.weight": rows for name, rows in names.items()}, columns)
        if not self._arch.biases.issuperset(parts):
            return Linear(weight)
        return Linear(weight, self._weights.vector({f"{name}.bias": rows for name, rows in names.items()}))

    def norm(self, name: str) -> torch.Tensor:
        """An RMS norm's weight, [hidden]."""
        return self._weights.vector({f"{self.named(name)}.weight": self._arch.hidden}, self._arch.family.norm_offset)

    def head_norm(self, name: str) -> torch.Tensor:
        """An RMS norm's weight over one head, [head_dim]."""
        parts = {f"{self.named(f'self_attn.{name}')}.weight": self._arch.head_dim}
        return self._weights.vector(parts, self._arch.family.norm_offset)

    def named(self, name: str) -> str:
        """A block or tensor of this layer as the checkpoint calls it."""
        return self._prefix + self._arch.family.names.get(name, name)
