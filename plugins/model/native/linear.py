"""The one place where activations meet weight matrices, so that a faster product can take its place."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x @ weight.T + bias, with weight [out, in] row-major and bias [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [K] -> [K, in]: the embedding of a tied head, or a few of the outputs' columns."""
        return self.weight[outputs]

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place: the residual needs no pass of its own."""
        if self.bias is not None:
            total += self.bias
        return total.addmm_(x, self.weight.t())
