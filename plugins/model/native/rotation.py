"""Queries and keys turned by their positions: torch's reference, and a compiled operator for float32 on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from phloem.kernels import load
from phloem.linear import Norm

Rotate = Callable[
    [torch.Tensor, int, int, torch.Tensor, torch.Tensor, Norm | None], Sequence[torch.Tensor]
]  # as `rotate`

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def rotate(
    qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None
) -> Sequence[torch.Tensor]:
    """qkv [T, Hq + 2 Hkv, D] -> q [T, Hq, D] and k [T, Hkv, D], normed with weights [Hq + Hkv, D] and rotated; and v.

    Pairs are (i, i + D/2); cos, sin [T, 1, D], the first half of sin negated. qkv is not needed any more.
    """
    qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
    if norm is not None:
        qk = F.rms_norm(qk, qk.shape[2:], None, norm.eps) * norm.weight
    qk = (qk * cos).addcmul_(qk.roll(qk.shape[2] // 2, -1), sin)
    return *torch.split(qk, [heads, kv_heads], 1), v


def compiled() -> Rotate:
    """`rotate` in C++, in place: for qkv in float32 on the CPU, each token's elements side by side; cos, sin without
    gaps. Raises PluginError where it cannot be built.
    """
    turn: Any = load(Path(__file__).with_name("rotation.cpp")).phloem_rotate
    turn.argtypes = (_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _FLOAT, _POINTER, _POINTER, _INT)
    turn.restype = None

    def rotated(
        qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None
    ) -> Sequence[torch.Tensor]:
        weights, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        turn(
            qkv.data_ptr(), qkv.shape[0], qkv.stride(0), heads + kv_heads, qkv.shape[2], weights, eps,
            cos.data_ptr(), sin.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return torch.split(qkv, [heads, kv_heads, kv_heads], 1)

    return rotated
