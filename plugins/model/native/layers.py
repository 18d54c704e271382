"""The arithmetic of one decoder layer over ragged tokens, and its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from phloem.interfaces import AttentionStep
from phloem.linear import Linear, Norm
from phloem.states import StateStep

from .config import Arch
from .rope import Rope
from .rotation import Rotate
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

    def finish(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called once the weights are filled."""


class Layer(Block):
    """A layer of two parts: what it mixes tokens by, which is a subclass's, and a gated MLP.

    Gate and up are one matrix, as are all that read the same input.
    """

    gate_up: Linear
    down: Linear
    out: Linear

    def __init__(self, arch: Arch, index: int, weights: Weights) -> None:
        """Asks for its parameters in `weights`, which fills them later. `index` counts all layers."""
        self.build = build = Builder(arch, weights, f"{arch.family.root}.layers.{index}.")
        sandwich = arch.family.sandwich
        self.mixer_norm = build.norm("input_layernorm")
        before_mlp = build.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        self.after_mixer = build.norm("post_attention_layernorm") if sandwich else None
        after_mlp = build.norm("post_feedforward_layernorm") if sandwich else None
        gate_up = {"gate_proj": arch.intermediate, "up_proj": arch.intermediate}
        build.linear((self, "gate_up"), "mlp", gate_up, arch.hidden, before=before_mlp, gate=arch.activation)
        build.linear((self, "down"), "mlp", {"down_proj": arch.hidden}, arch.intermediate, after=after_mlp)

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """In place."""
        self.out.add_to(h, self.mix(h, step))
        return self.down.add_to(h, self.gate_up(h))

    @abstractmethod
    def mix(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, hidden], not normed yet, -> what `out` reads, [T, *]: here tokens meet those before them."""


class AttentionLayer(Layer):
    """A layer that attends. Queries, keys and values are one matrix."""

    qkv: Linear

    def __init__(self, arch: Arch, index: int, weights: Weights, attending: int, rotate: Rotate) -> None:
        """`attending` counts the layers that attend."""
        super().__init__(arch, index, weights)
        self.attending = attending
        self.window, self.rope = arch.layers[index].window, arch.layers[index].rope
        self.scale = arch.scale
        self.heads, self.kv_heads, self.head_dim = arch.heads, arch.kv_heads, arch.head_dim
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.build.linear((self, "qkv"), "self_attn", qkv, arch.hidden, before=self.mixer_norm)
        self.build.linear((self, "out"), "self_attn", {"o_proj": arch.hidden}, q, after=self.after_mixer)
        self.q_norm = self.build.head_norm("q_norm") if arch.family.qk_norm else None
        self.k_norm = self.build.head_norm("k_norm") if arch.family.qk_norm else None
        self.head_norm: Norm | None = None
        self.rotate = rotate

    def finish(self) -> None:
        """One [Hq + Hkv, D] table norms queries and keys in a single pass."""
        if self.q_norm is not None and self.k_norm is not None:
            rows = [self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)]
            self.head_norm = Norm(torch.cat(rows), self.q_norm.eps)

    def mix(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention, [T, heads * head_dim]."""
        assert self.rope is not None, "a layer that attends has a rotation"
        qkv = self.qkv(h).view(h.shape[0], -1, self.head_dim)
        q, k, v = self.rotate(qkv, self.heads, self.kv_heads, *step.rotations[self.rope], self.head_norm)
        return step.attend(self.attending, q, k, v, scale=self.scale, window=self.window).flatten(1)


class Builder:
    """Names and shapes of a layer's parameters, in Hugging Face's terms."""

    def __init__(self, arch: Arch, weights: Weights, prefix: str) -> None:
        self._arch = arch
        self._weights = weights
        self._prefix = prefix

    def linear(
        self,
        place: tuple[object, str],
        block: str,
        parts: dict[str, int],
        columns: int,
        *,
        before: Norm | None = None,
        gate: str | None = None,
        after: Norm | None = None,
    ) -> None:
        """A projection as an attribute of an object; biases exist where the architecture has them for all its parts."""
        names = {self.named(f"{block}.{name}"): rows for name, rows in parts.items()}
        tensors = {f"{name}.weight": rows for name, rows in names.items()}
        bias = None
        if self._arch.biases.issuperset(parts):
            bias = self._weights.vector({f"{name}.bias": rows for name, rows in names.items()})
        self._weights.linear(place, tensors, columns, bias=bias, before=before, gate=gate, after=after)

    def norm(self, name: str) -> Norm:
        """An RMS norm over [hidden]."""
        return self._norm(name, self._arch.hidden)

    def head_norm(self, name: str) -> Norm:
        """An RMS norm over one head, [head_dim]."""
        return self._norm(f"self_attn.{name}", self._arch.head_dim)

    def _norm(self, name: str, length: int) -> Norm:
        parts = {f"{self.named(name)}.weight": length}
        return Norm(self._weights.vector(parts, self._arch.family.norm_offset), self._arch.norm_eps)

    def named(self, name: str) -> str:
        """A block or tensor of this layer as the checkpoint calls it."""
        return self._prefix + self._arch.family.names.get(name, name)
