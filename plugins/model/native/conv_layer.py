"""A layer that mixes by a gated short convolution in the place of attention (LFM2)."""

from __future__ import annotations

import torch

from .config import Arch
from .layers import Layer, Step
from .linear import Linear
from .packed import Gemm, PackedLinear
from .weights import Weights


class ConvLayer(Layer):
    """y = out(C * conv(B * x)), with B, C and x from one projection of the input. After `Lfm2ShortConv`."""

    def __init__(self, arch: Arch, index: int, weights: Weights, recurrent: int) -> None:
        """`recurrent` counts layers of this kind."""
        super().__init__(arch, index, weights)
        self.recurrent = recurrent
        kernel, hidden = arch.layers[index].kernel, arch.hidden
        assert kernel is not None, "a layer without a convolution"
        name = self.build.named

        def linear(part: str, rows: int) -> Linear:
            weight = weights.matrix({f"{name(part)}.weight": rows}, hidden)
            return Linear(weight, weights.vector({f"{name(part)}.bias": rows}) if arch.conv_bias else None)

        self.project, self.out = linear("conv.in_proj", 3 * hidden), linear("conv.out_proj", hidden)
        self.filter = weights.tensor(f"{name('conv.conv')}.weight", hidden, 1, kernel)[:, 0]
        self.bias = weights.vector({f"{name('conv.conv')}.bias": hidden}) if arch.conv_bias else None

    def pack(self, gemm: Gemm) -> None:
        """See `Layer.pack`."""
        self.project = PackedLinear(gemm, self.project)
        super().pack(gemm)

    def mix(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The gated convolution, [T, hidden]."""
        assert step.conv is not None and step.states is not None, "a step without states"  # noqa: PT018
        (state,) = step.states.initial(self.recurrent)
        b, c, x = self.project(x).chunk(3, dim=1)
        out, kept = step.conv(b * x, state, self.filter, self.bias)
        step.states.keep(self.recurrent, (kept,))
        return out.mul_(c)
