"""A layer that mixes by a gated short convolution in the place of attention (LFM2)."""

from __future__ import annotations

import torch

from phloem.linear import Linear, Norm

from .config import Arch
from .layers import Layer, Step
from .weights import Weights


class ConvLayer(Layer):
    """y = out(C * conv(B * x)), with B, C and x from one projection of the input. After `Lfm2ShortConv`."""

    project: Linear

    def __init__(self, arch: Arch, index: int, weights: Weights, recurrent: int) -> None:
        """`recurrent` counts layers of this kind."""
        super().__init__(arch, index, weights)
        self.recurrent = recurrent
        kernel, hidden = arch.layers[index].kernel, arch.hidden
        assert kernel is not None, "a layer without a convolution"
        name = self.build.named

        def linear(attribute: str, part: str, rows: int, before: Norm | None = None) -> None:
            bias = weights.vector({f"{name(part)}.bias": rows}) if arch.conv_bias else None
            weights.linear((self, attribute), {f"{name(part)}.weight": rows}, hidden, bias=bias, before=before)

        linear("project", "conv.in_proj", 3 * hidden, self.mixer_norm)
        linear("out", "conv.out_proj", hidden)
        self.filter = weights.tensor(f"{name('conv.conv')}.weight", hidden, 1, kernel)[:, 0]
        self.bias = weights.vector({f"{name('conv.conv')}.bias": hidden}) if arch.conv_bias else None

    def mix(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """The gated convolution, [T, hidden]."""
        assert step.conv is not None and step.states is not None, "a step without states"  # noqa: PT018
        (state,) = step.states.initial(self.recurrent)
        b, c, x = self.project(h).chunk(3, dim=1)
        out, kept = step.conv(b * x, state, self.filter, self.bias)
        step.states.keep(self.recurrent, (kept,))
        return out.mul_(c)
