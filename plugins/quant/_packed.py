"""Float32 weights in panels, as packed.cpp multiplies them."""

from __future__ import annotations

import ctypes

import torch

from phloem.linear import Linear

from ._compiled import INT, POINTER, CompiledLinear, Kernel, Matrix

SOURCE = "packed.cpp"


class _Packed(ctypes.Structure):
    """`Packed` of packed.cpp."""

    _fields_ = (("matrix", Matrix), ("panels", POINTER))


class PackedLinear(CompiledLinear):
    """The same numbers as torch's over a weight [out, in]; `weight` is [panels, in, width of a panel]."""

    __slots__ = ()

    def __init__(self, kernel: Kernel, linear: Linear) -> None:
        """`kernel` is that of `SOURCE`."""
        floats = linear.floats().float().contiguous()
        inputs = floats.shape[1]
        weight = torch.empty(kernel.panels(linear), inputs, 2 * kernel.lanes)
        told = _Packed(Matrix.of(linear), weight.data_ptr())
        super().__init__(kernel, linear, weight, told, 4 * inputs if linear.before else 0)
        pack = kernel.function("pack", POINTER, POINTER, POINTER, INT)
        pack(self._address, floats.data_ptr(), weight.data_ptr(), torch.get_num_threads())

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the original weight, [K] -> [K, in]; not of a gated one."""
        panels = self.weight
        assert isinstance(panels, torch.Tensor), "panels are a tensor"
        width = panels.shape[2]
        return panels[outputs // width, :, outputs % width]
