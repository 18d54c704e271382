"""Weights rounded to 4 bits on loading, 32 values to a scale and a minimum."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.kernels import load
from phloem.linear import Linear

from ._blocks import BlockKernel, BlockLinear
from ._blocks_kinds import BLOCK, KINDS, to_q8_0
from ._compiled import INT, INT64, POINTER

_WORDS = 16  # outputs per input, of a matrix with a row for each token: an embedding or an output head


class Int4:
    """Kind `quant`, name `int4`: any model's matrices as `Q4_1`, 5 bits a weight; embedding and head as `Q8_0`.

    These two are kept finer as in llama.cpp's own files of 4 bits, whose embedding is Q8_0 or Q6_K.
    """

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset[str]()
    weight_bits = 5

    class Options(BaseModel):
        """There are none."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError where the product cannot be compiled, or the model is not float32 on a CPU."""
        self._kernel = BlockKernel("int4", context)
        self._quantise = load(Path(__file__).with_name("int4.cpp")).phloem_quantise
        self._quantise.argtypes, self._quantise.restype = (POINTER, INT64, INT64, POINTER, INT), None

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`."""
        floats = linear.floats().float().contiguous()
        words = linear.gate is None and floats.shape[0] >= _WORDS * floats.shape[1]
        part = ("Q8_0", to_q8_0(floats)) if words else ("Q4_1", self._rounded(floats))
        return BlockLinear(self._kernel, linear, [part])

    def _rounded(self, floats: torch.Tensor) -> torch.Tensor:
        rows, inputs = floats.shape
        stored = torch.empty(rows, -(-inputs // BLOCK) * KINDS["Q4_1"].size, dtype=torch.uint8)
        self._quantise(floats.data_ptr(), rows, inputs, stored.data_ptr(), torch.get_num_threads())
        return stored
