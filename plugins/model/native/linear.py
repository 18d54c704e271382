"""The one place where activations meet weight matrices, so that a faster product can take its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {  # as configs call them
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Norm(NamedTuple):
    """An RMS norm over the last dimension: its weight, of that length, and what is added to the mean square."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, n], which may be wider than the weight, -> [T, n] in the weight's dtype."""
        return F.rms_norm(x.to(self.weight.dtype), x.shape[1:], self.weight, self.eps)


class Linear:
    """y = x @ weight.T + bias, with weight [out, in] row-major and bias [out] or None; and what goes along with it.

    `before` norms the input. `gate`, one of `GATES`, is applied to the first half of the outputs, which is then
    multiplied by the second: half as many are left. `after` norms what comes out.
    """

    __slots__ = ("after", "before", "bias", "gate", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        before: Norm | None = None,
        gate: str | None = None,
        after: Norm | None = None,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.before, self.gate, self.after = before, gate, after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out], in the weight's dtype."""
        y = F.linear(x if self.before is None else self.before(x), self.weight, self.bias)
        if self.gate is not None:
            first, second = y.chunk(2, dim=1)
            y = GATES[self.gate](first).mul_(second)
        return y if self.after is None else self.after(y)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place: the residual needs no pass of its own."""
        if self.before is not None or self.gate is not None or self.after is not None:
            return total.add_(self(x))
        if self.bias is not None:
            total += self.bias
        return total.addmm_(x, self.weight.t())

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [K] -> [K, in]: the embedding of a tied head, or a few of the outputs' columns."""
        return self.weight[outputs]
