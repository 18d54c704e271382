"""Matrices as the file has them: blocks of few bits run as they are, floats as `none` multiplies them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.linear import Blocks, Linear

from ._blocks import BlockKernel, BlockLinear
from ._blocks_kinds import KINDS
from ._blocks_strips import fits
from ._compiled import Kernel
from ._packed import SOURCE, PackedLinear


class Stored:
    """Kind `quant`, name `stored`: what `auto` means where it can be had. Nothing is rounded that the file has not.

    A matrix whose parts are stored in several ways and do not end where a strip of outputs does is read as floats.
    """

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset(KINDS)

    class Options(BaseModel):
        """There are none: the file has decided."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError where the products cannot be compiled, or the model is not float32 on a CPU."""
        self._blocks, self._packed = BlockKernel("stored", context), Kernel(SOURCE)

    @classmethod
    def suits(cls, context: PluginContext) -> str | None:
        """None, or why `auto` means `none`, which tells the log where there is no compiler."""
        try:
            cls(cls.Options(), context)
        except PluginError as error:
            return error.message
        return None

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`."""
        weight = linear.weight
        if isinstance(weight, Blocks) and fits(weight.parts, self._blocks.lanes, gated=linear.gate is not None):
            return BlockLinear(self._blocks, linear, weight.parts)
        return PackedLinear(self._packed, linear)
