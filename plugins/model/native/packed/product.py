"""Linear layers over packed weights: the same numbers as torch's, read from memory once per step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from phloem.kernels import load

from ..linear import Linear

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Gemm:
    """The compiled functions. One per model; raises PluginError where they cannot be built."""

    def __init__(self) -> None:
        library = load(Path(__file__).with_name("gemm.cpp"))
        library.phloem_panel.restype = _INT64
        library.phloem_panel.argtypes = ()
        self.panel: int = library.phloem_panel()
        self.pack = self._function(library.phloem_pack, (_POINTER, _INT64, _INT64, _POINTER, _INT))
        self.multiply = self._function(
            library.phloem_gemm,
            (_POINTER, _INT64, _INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _INT64, _INT, _INT),
        )

    @staticmethod
    def _function(function: Any, arguments: Sequence[type]) -> Callable[..., None]:
        function.argtypes = tuple(arguments)
        function.restype = None
        made: Callable[..., None] = function
        return made


class PackedLinear(Linear):
    """A Linear whose weight [out, in], float32 on the CPU, lies in panels; the original is not kept."""

    __slots__ = ("_gemm", "_inputs", "_outputs")

    def __init__(self, gemm: Gemm, linear: Linear) -> None:
        self._gemm = gemm
        self.bias = linear.bias
        weight = linear.weight.contiguous()
        self._outputs, self._inputs = weight.shape
        panels = -(-self._outputs // gemm.panel)
        self.weight = torch.empty(panels, self._inputs, gemm.panel)
        gemm.pack(weight.data_ptr(), self._outputs, self._inputs, self.weight.data_ptr(), torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return self._multiply(x, torch.empty(x.shape[0], self._outputs), add=False)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place."""
        return self._multiply(x, total, add=True)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the original weight, [K] -> [K, in]."""
        return self.weight[outputs // self._gemm.panel, :, outputs % self._gemm.panel]

    def _multiply(self, x: torch.Tensor, y: torch.Tensor, *, add: bool) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = self.bias.data_ptr() if self.bias is not None else None
        self._gemm.multiply(
            x.data_ptr(), x.shape[0], x.stride(0), self.weight.data_ptr(), self._outputs, self._inputs,
            bias, y.data_ptr(), y.stride(0), add, torch.get_num_threads(),
        )  # fmt: skip
        return y
