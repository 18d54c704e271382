"""Linear layers over packed weights: the same numbers as torch's, read from memory once per step."""

from __future__ import annotations

import ctypes

import torch

from ..linear import GATES, Linear
from .operators import Matrix, Operators

_GATES: dict[str | None, int] = {name: i for i, name in enumerate((None, *GATES))}  # as operators.cpp numbers them


class PackedLinear(Linear):
    """A Linear whose weight [out, in], float32 on the CPU, lies in panels; the original is not kept.

    Norms, gate and residual are part of the one call. `weight` is [panels, in, width of a panel].
    """

    __slots__ = ("_address", "_matrix", "_operators", "_outputs", "_scratch")

    def __init__(self, operators: Operators, linear: Linear) -> None:
        super().__init__(linear.weight, linear.bias, before=linear.before, gate=linear.gate, after=linear.after)
        self._operators = operators
        weight = linear.weight.contiguous()
        rows, inputs = weight.shape
        self._outputs = rows if self.gate is None else rows // 2
        each = operators.lanes * (2 if self.gate is None else 1)
        self.weight = torch.empty(-(-self._outputs // each), inputs, 2 * operators.lanes)
        self._scratch = (inputs if self.before else 0) + (self._outputs if self.after else 0)  # floats a row
        self._matrix = matrix = Matrix(panels=self.weight.data_ptr(), n=rows, k=inputs, gate=_GATES[self.gate])
        self._address = ctypes.addressof(matrix)
        if self.bias is not None:
            matrix.bias = self.bias.data_ptr()
        if self.before is not None:
            matrix.before, matrix.before_eps = self.before.weight.data_ptr(), self.before.eps
        if self.after is not None:
            matrix.after, matrix.after_eps = self.after.weight.data_ptr(), self.after.eps
        operators.pack(self._address, weight.data_ptr(), self.weight.data_ptr(), torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return self._multiply(x, torch.empty(x.shape[0], self._outputs), add=False)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place."""
        return self._multiply(x, total, add=True)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the original weight, [K] -> [K, in]; not of a gated one."""
        width = self.weight.shape[2]
        return self.weight[outputs // width, :, outputs % width]

    def _multiply(self, x: torch.Tensor, y: torch.Tensor, *, add: bool) -> torch.Tensor:
        rows, (step, apart) = x.shape[0], x.stride()
        if apart != 1:
            x = x.contiguous()
            step = x.stride(0)
        scratch = self._operators.scratch(rows * self._scratch) if self._scratch else None
        self._operators.multiply(
            self._address, x.data_ptr(), rows, step, y.data_ptr(), y.stride(0), add, scratch, torch.get_num_threads()
        )
        return y
