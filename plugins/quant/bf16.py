"""Weights rounded to bfloat16 on loading: half the bytes of float32, and half the time to read them."""

from __future__ import annotations

import ctypes

import torch
from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.linear import Linear

from ._compiled import INT, INT64, POINTER, Matrix
from ._tiles import TileKernel, TileLinear


class Bf16:
    """Kind `quant`, name `bf16`. Sums are float32; inputs are rounded, too, where the processor multiplies bfloat16."""

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset[str]()
    weight_bits = 16

    class Options(BaseModel):
        """There are none."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError where the product cannot be compiled, or the model is not float32 on a CPU."""
        self._kernel = TileKernel("bf16", context)

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`."""
        return Bf16Linear(self._kernel, linear)


class _Narrow(ctypes.Structure):
    """`Narrow` of bf16.cpp."""

    _fields_ = (("matrix", Matrix), ("panels", POINTER), ("unit", INT64))


class Bf16Linear(TileLinear):
    """The product of bf16.cpp."""

    __slots__ = ()

    def __init__(self, kernel: TileKernel, linear: Linear) -> None:
        floats, weight = linear.floats().float().contiguous(), kernel.allocate(linear, 2)
        super().__init__(kernel, linear, weight, _Narrow(Matrix.of(linear), weight.data_ptr(), kernel.unit))
        pack = kernel.function("pack", POINTER, POINTER, POINTER, INT)
        pack(self._address, floats.data_ptr(), weight.data_ptr(), torch.get_num_threads())

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as floats, [K] -> [K, in]; not of a gated one."""
        return self.stored(outputs, torch.bfloat16).float()
