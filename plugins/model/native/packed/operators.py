"""The compiled operators of operators.cpp, as ctypes calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from phloem.kernels import load

from ..linear import Norm

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Matrix(ctypes.Structure):
    """`Matrix` of operators.cpp, field by field. Whoever makes one keeps alive what it points to."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "bias", "before", "after")),
        *((name, _INT64) for name in ("n", "k", "gate")),
        *((name, _FLOAT) for name in ("before_eps", "after_eps")),
    )


class Operators:
    """The functions. One per model, whose steps run one after the other; raises PluginError if they can't be built."""

    def __init__(self) -> None:
        library = load(Path(__file__).with_name("operators.cpp"))
        library.phloem_lanes.restype, library.phloem_lanes.argtypes = _INT64, ()
        self.lanes: int = library.phloem_lanes()
        self.pack = _function(library.phloem_pack, _POINTER, _POINTER, _POINTER, _INT)
        self.multiply = _function(
            library.phloem_multiply, _POINTER, _POINTER, _INT64, _INT64, _POINTER, _INT64, _INT, _POINTER, _INT
        )
        self._rotate = _function(
            library.phloem_rotate,
            *(_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _FLOAT, _POINTER, _POINTER, _INT),
        )
        self._scratch = torch.empty(0)

    def scratch(self, floats: int) -> int:
        """The address of memory for one call, kept from step to step: fresh pages cost more than what is done there."""
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats + floats // 4)
        return self._scratch.data_ptr()

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None
    ) -> Sequence[torch.Tensor]:
        """`layers.rotate`, in place: qkv float32, each token's elements side by side; cos and sin without gaps."""
        weights, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        self._rotate(
            qkv.data_ptr(), qkv.shape[0], qkv.stride(0), heads + kv_heads, qkv.shape[2], weights, eps,
            cos.data_ptr(), sin.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return torch.split(qkv, [heads, kv_heads, kv_heads], 1)


def _function(function: Any, *arguments: type) -> Callable[..., None]:
    function.argtypes = arguments
    function.restype = None
    made: Callable[..., None] = function
    return made
