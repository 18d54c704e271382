"""Weights in blocks of few bits as a GGUF file has them, with no detour through floats."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.linear import Blocks, Linear

from ._blocks import BlockKernel, BlockLinear
from ._blocks_kinds import KINDS, to_q8_0
from ._blocks_strips import fits


class GgufBlocks:
    """Kind `quant`, name `gguf`: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K run as they are stored.

    What is stored otherwise (as floats, in other kinds, changed by the model on loading) is kept as Q8_0, and so is a
    matrix made of parts of different kinds that do not end where a strip of outputs does.
    """

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset(KINDS)
    weight_bits = 8.5  # of what is not stored in blocks

    class Options(BaseModel):
        """There are none: the file has decided."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError where the product cannot be compiled, or the model is not float32 on a CPU."""
        self._kernel = BlockKernel("gguf", context)

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`."""
        weight = linear.weight
        if isinstance(weight, Blocks) and fits(weight.parts, self._kernel.lanes, gated=linear.gate is not None):
            return BlockLinear(self._kernel, linear, weight.parts)
        return BlockLinear(self._kernel, linear, [("Q8_0", to_q8_0(linear.floats()))])
