"""Linear layers over weights of 16 or 8 bits, in panels as _tiles.h lays them out."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from phloem.interfaces import PluginContext
from phloem.linear import Linear

from ._compiled import INT64, POINTER, CompiledLinear, Kernel, require_float32

_GROUPS, _GROUP = 16, 4  # of a step; bytes of an output's weights in one


class TileKernel(Kernel):
    """A compiled product over _tiles.h. One per quant.

    `unit` says whether products go through the processor's matrix unit, where it has one and the system lets us use it.
    """

    def __init__(self, name: str, context: PluginContext) -> None:
        """Compiles NAME.cpp; raises PluginError where it cannot be, or the model is not float32 on a CPU."""
        require_float32(name, context)
        super().__init__(f"{name}.cpp")
        self.unit = bool(self._asked("unit")())
        self.row_bytes = self._asked("row_bytes", POINTER)
        self.taken = self.function("taken", POINTER, INT64, POINTER)

    def _asked(self, name: str, *arguments: type) -> Any:
        function: Any = self._library[f"phloem_{name}"]
        function.argtypes, function.restype = arguments, INT64
        return function

    def allocate(self, linear: Linear, size: int) -> torch.Tensor:
        """Panels [panels, steps, 2, groups, lanes, 4 bytes] for a linear map with weights of `size` bytes."""
        steps = -(-linear.weight.shape[1] * size // (_GROUPS * _GROUP))
        return torch.empty(self.panels(linear), steps, 2, _GROUPS, self.lanes, _GROUP, dtype=torch.uint8)


class TileLinear(CompiledLinear):
    """Over a weight [out, in]; `weight` is the panels, uint8 [panels, steps, 2, groups, lanes, 4]."""

    __slots__ = ("_inputs",)

    def __init__(self, kernel: TileKernel, linear: Linear, weight: torch.Tensor, told: ctypes.Structure) -> None:
        """`told` is `Told` of the kernel, but for the matrix and the panels' content, which `pack` fills."""
        self._inputs = linear.weight.shape[1]
        super().__init__(kernel, linear, weight, told, kernel.row_bytes(ctypes.addressof(told)))

    def stored(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight as they are stored, [K] -> [K, in] of `dtype`; not of a gated one."""
        panels = self.weight
        assert isinstance(panels, torch.Tensor), "panels are a tensor"
        assert self.gate is None, "a gate mixes the rows of a panel"
        lanes = panels.shape[4]
        half, lane = outputs // lanes % 2, outputs % lanes
        taken = panels[outputs // (2 * lanes), :, half, :, lane]  # [K, steps, groups, 4]
        return taken.flatten(1).view(dtype)[:, : self._inputs]

    def at(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """See `Linear.at`: x is rounded as the product rounds it."""
        assert isinstance(self._kernel, TileKernel), "it was made with one"
        rounded, given = torch.empty(self._inputs), x.contiguous()
        self._kernel.taken(given.data_ptr(), self._inputs, rounded.data_ptr())
        return self.rows(outputs) @ rounded
