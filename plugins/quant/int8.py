"""Weights rounded to 8 bits on loading, with a scale per output: a quarter of float32's bytes, integer products."""

from __future__ import annotations

import ctypes

import torch
from pydantic import BaseModel, ConfigDict

from phloem.errors import ModelError
from phloem.interfaces import PluginContext
from phloem.linear import Linear

from ._compiled import INT, INT64, POINTER, Matrix
from ._tiles import TileKernel, TileLinear

_WIDEST = 1 << 17  # inputs whose products surely add up in 32 bits


class Int8:
    """Kind `quant`, name `int8`. Inputs are rounded to 15 bits, each row with a scale of its own; sums are exact."""

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset[str]()
    weight_bits = 8

    class Options(BaseModel):
        """There are none."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError where the product cannot be compiled, or the model is not float32 on a CPU."""
        self._kernel = TileKernel("int8", context)

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`; raises ModelError for a matrix too wide for exact sums."""
        if linear.weight.shape[1] > _WIDEST:
            raise ModelError(
                f"quant.use: int8 adds up at most {_WIDEST:,} inputs, a matrix has {linear.weight.shape[1]:,}",
                hint="say quant.use: bf16",
            )
        return Int8Linear(self._kernel, linear)


class _Eight(ctypes.Structure):
    """`Eight` of int8.cpp."""

    _fields_ = (("matrix", Matrix), ("panels", POINTER), ("scales", POINTER), ("unit", INT64))


class Int8Linear(TileLinear):
    """The product of int8.cpp."""

    __slots__ = ("_scales",)

    def __init__(self, kernel: TileKernel, linear: Linear) -> None:
        floats, weight = linear.floats().float().contiguous(), kernel.allocate(linear, 1)
        self._scales = torch.empty(len(weight), 2 * kernel.lanes)
        told = _Eight(Matrix.of(linear), weight.data_ptr(), self._scales.data_ptr(), kernel.unit)
        super().__init__(kernel, linear, weight, told)
        pack = kernel.function("pack", POINTER, POINTER, POINTER, POINTER, INT)
        where = floats.data_ptr(), weight.data_ptr(), self._scales.data_ptr()
        pack(self._address, *where, torch.get_num_threads())

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as floats, [K] -> [K, in]; not of a gated one."""
        stored = self.stored(outputs, torch.uint8).float() - 128  # see int8.cpp
        return stored * self._scales.flatten()[outputs, None]
