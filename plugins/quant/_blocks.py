"""Linear maps over blocks of few bits: x is rounded to 8 bits, and what shares its scales is multiplied in integers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from phloem.interfaces import PluginContext
from phloem.linear import Linear

from ._blocks_kinds import BLOCK
from ._blocks_strips import Part, lay_out
from ._compiled import INT, INT64, POINTER, CompiledLinear, Kernel, Matrix, require_float32

_ROUNDED = BLOCK + 20  # bytes of `Rounded` of blocks.cpp


class BlockKernel(Kernel):
    """blocks.cpp. One per quant; raises PluginError where it cannot be compiled or does not apply."""

    def __init__(self, name: str, context: PluginContext) -> None:
        require_float32(name, context)
        super().__init__("blocks.cpp")
        self.rows = self.function("rows", POINTER, POINTER, INT64, POINTER, INT)
        self.round = self.function("round", POINTER, INT64, POINTER)


class _Told(ctypes.Structure):
    """`Blocks` of blocks.cpp."""

    _fields_ = (("matrix", Matrix), *((name, POINTER) for name in ("strips", "offsets", "kinds")))


class BlockLinear(CompiledLinear):
    """Over blocks as a file has them. `weight` is the strips, uint8."""

    __slots__ = ("_inputs", "_strips")

    def __init__(self, kernel: BlockKernel, linear: Linear, parts: Sequence[Part]) -> None:
        """`parts`, see `lay_out`, take the place of the linear map's weight."""
        self._inputs = linear.weight.shape[1]
        self._strips = strips = lay_out(parts, kernel.lanes, gated=linear.gate is not None)
        told = _Told(Matrix.of(linear), *(tensor.data_ptr() for tensor in strips))
        normed = 4 * self._inputs if linear.before else 0
        super().__init__(kernel, linear, strips.data, told, -(-self._inputs // BLOCK) * _ROUNDED + normed)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as floats, [K] -> [K, in]; not of a gated one."""
        made, wanted = torch.empty(len(outputs), self._inputs), outputs.contiguous()
        self._block_kernel.rows(self._address, wanted.data_ptr(), len(wanted), made.data_ptr(), torch.get_num_threads())
        return made

    def at(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """See `Linear.at`: x is rounded as the product rounds it."""
        rounded, given = torch.empty(self._inputs), x.contiguous()
        self._block_kernel.round(given.data_ptr(), self._inputs, rounded.data_ptr())
        return self.rows(outputs) @ rounded

    @property
    def _block_kernel(self) -> BlockKernel:
        assert isinstance(self._kernel, BlockKernel), "it was made with one"
        return self._kernel
