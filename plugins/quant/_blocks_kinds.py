"""GGUF's blocks of few bits taken apart into values and scales, and floats made into the simplest of them.

After `dequantize_row_*` in ggml-quants.c of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import unflatten

_AT_A_TIME = 4096  # rows made into blocks, so that it needs little memory beside the matrix
BLOCK, SUPER = 32, 8  # values of a block; blocks that share two floats in the kinds called K


class Apart(NamedTuple):
    """Rows of a matrix: what every kind has, in bytes."""

    q: torch.Tensor  # the values, unsigned, uint8 [rows, blocks, BLOCK]
    floats: torch.Tensor  # float16 as bytes, [rows, n, 1 or 2, 2]: scale and minimum of each block, or of each SUPER
    steps: torch.Tensor | None = None  # [rows, n, 2 * SUPER]: two factors of each block of a SUPER


class BlockKind(NamedTuple):
    """How a kind is stored and where blocks.cpp finds it."""

    number: int  # in the table of blocks.cpp
    bits: int
    size: int  # bytes stored
    apart: Callable[[torch.Tensor], Apart]  # of the bytes stored, [rows, n, size]


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 2, n]: the low halves of all bytes, then the high ones."""
    return torch.stack([stored & 15, stored >> 4], -2)


def _bits(stored: torch.Tensor, width: int) -> torch.Tensor:
    """[..., n] -> [..., 8 / width, n]: the lowest `width` bits of all bytes, then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (stored[..., None, :] >> shifts).bitwise_and_(2**width - 1)


def _plain(fields: int, bits: int) -> Callable[[torch.Tensor], Apart]:
    """Blocks that begin with `fields` floats: `q4_0` and `q4_1`, `q5_0` and `q5_1`, `q8_0`."""

    def apart(stored: torch.Tensor) -> Apart:
        floats = unflatten(stored[..., : 2 * fields], -1, (fields, 2))
        rest = stored[..., 2 * fields :]
        if bits == 8:
            return Apart(rest ^ 128, floats)
        q = _nibbles(rest[..., -16:]).flatten(-2)
        if bits == 5:
            q |= _bits(rest[..., :4], 1).transpose(-1, -2).flatten(-2) << 4
        return Apart(q, floats)

    return apart


def _k4(bits: int) -> Callable[[torch.Tensor], Apart]:
    """`q4_K` and `q5_K`: two floats, 6 bits of scale and of minimum for each block, a bit plane, 4 bits."""

    def apart(stored: torch.Tensor) -> Apart:
        floats = unflatten(stored[..., :4], -1, (2, 2))
        low, middle, high = unflatten(stored[..., 4:16], -1, (3, 4)).unbind(-2)
        scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
        minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
        q = _nibbles(unflatten(stored[..., -128:], -1, (4, 32))).flatten(-3, -2)  # [rows, n, SUPER, BLOCK]
        if bits == 5:
            q |= _bits(stored[..., 16:48], 1) << 4
        return Apart(q.flatten(1, 2), floats, torch.stack([scales, minima], -1).flatten(-2))

    return apart


def _k6(stored: torch.Tensor) -> Apart:
    """`q6_K`: 4 bits of 256 values, 2 bits more, 16 scales of 8 bits, a float."""
    low = unflatten(_nibbles(unflatten(stored[..., :128], -1, (2, 64))), -1, (2, 32))  # [rows, n, 2, 2, 2, 32]
    high = _bits(unflatten(stored[..., 128:192], -1, (2, 32)), 2)
    q = low.flatten(-3, -2) | high << 4  # [rows, n, 2, 4, 32]
    return Apart(q.flatten(1, 3), unflatten(stored[..., 208:], -1, (1, 2)), stored[..., 192:208])


KINDS: Mapping[str, BlockKind] = {
    "Q4_0": BlockKind(0, 4, 18, _plain(1, 4)),
    "Q4_1": BlockKind(1, 4, 20, _plain(2, 4)),
    "Q5_0": BlockKind(2, 5, 22, _plain(1, 5)),
    "Q5_1": BlockKind(3, 5, 24, _plain(2, 5)),
    "Q8_0": BlockKind(4, 8, 34, _plain(1, 8)),
    "Q4_K": BlockKind(5, 4, 144, _k4(4)),
    "Q5_K": BlockKind(6, 5, 176, _k4(5)),
    "Q6_K": BlockKind(7, 6, 210, _k6),
}


def take_apart(kind: str, stored: torch.Tensor) -> Apart:
    """Bytes as a file has them, uint8 [rows, bytes of a row], in the terms of `Apart`."""
    known = KINDS[kind]
    return known.apart(unflatten(stored, -1, (-1, known.size)))


def to_q8_0(floats: torch.Tensor) -> torch.Tensor:
    """Rows [rows, in] as blocks of `Q8_0`, uint8 [rows, bytes]; the last block of a row is filled with zeros."""
    return torch.cat([_to_q8_0(part) for part in torch.split(floats, _AT_A_TIME)])


def _to_q8_0(floats: torch.Tensor) -> torch.Tensor:
    blocks = unflatten(F.pad(floats.float(), (0, -floats.shape[1] % BLOCK)), 1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    q = torch.where(scale > 0, blocks / scale, 0).round().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), q.view(torch.uint8)], -1).flatten(1)
