"""Where blocks.cpp wants the bytes of a matrix: strips of a few outputs, which it streams through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import unflatten

from ._blocks_kinds import KINDS, Apart, take_apart

LINE = 64  # bytes; scales and values of a strip begin at one
_AT_A_TIME = 1 << 22  # values taken apart at a time, so that it needs little memory beside the matrix

Part = tuple[str, torch.Tensor]


class Strips(NamedTuple):
    """A matrix as the kernel reads it."""

    data: torch.Tensor  # uint8
    offsets: torch.Tensor  # int64 [strips + 1], in bytes
    kinds: torch.Tensor  # uint8 [strips], numbers of kinds


def lay_out(parts: Sequence[Part], lanes: int, *, gated: bool) -> Strips:
    """Strips of `lanes` outputs; with a gate, those of the first half and of the second take turns. Once per matrix.

    `parts` follow each other by rows, the name of a kind and its bytes, uint8 [rows, bytes of a row]; see `fits`.
    """
    halves = _cut(parts) if gated else [parts]
    with _one_thread():
        made = [[strip for part in half for strip in _strips(*part, lanes)] for half in halves]
    if gated:
        order = [strip for pair in zip(*made, strict=True) for strip in pair]
    else:
        order = made[0] if len(made[0]) % 2 == 0 else [*made[0], (made[0][-1][0], torch.zeros_like(made[0][-1][1]))]
    sizes = torch.tensor([0, *(len(data) for _, data in order)])
    kinds = torch.tensor([KINDS[kind].number for kind, _ in order], dtype=torch.uint8)
    return Strips(torch.cat([data for _, data in order]), sizes.cumsum(0), kinds)


def fits(parts: Sequence[Part], lanes: int, *, gated: bool) -> bool:
    """Whether all parts, but for the last of the rows or of a half of them, end with a strip."""
    halves = _cut(parts) if gated else [parts]
    return all(len(stored) % lanes == 0 for half in halves for _, stored in half[:-1])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pieces are so small that waking a second thread takes longer than their work, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cut(parts: Sequence[Part]) -> Sequence[Sequence[Part]]:
    """The two halves of a gated matrix's rows."""
    left = sum(len(stored) for _, stored in parts) // 2
    halves: list[list[Part]] = [[], []]
    for kind, stored in parts:
        for half, rows in zip(halves, (stored[:left], stored[left:]), strict=True):
            if len(rows):
                half.append((kind, rows))
        left = max(0, left - len(stored))
    return halves


def _strips(kind: str, stored: torch.Tensor, lanes: int) -> list[Part]:
    values = stored.shape[1] // KINDS[kind].size * 256  # at most
    rows = max(1, _AT_A_TIME // values // lanes) * lanes
    return [
        (kind, strip)
        for start in range(0, len(stored), rows)
        for strip in _arranged(kind, stored[start : start + rows], lanes).unbind(0)
    ]


def _arranged(kind: str, stored: torch.Tensor, lanes: int) -> torch.Tensor:
    """uint8 [strips, bytes], missing outputs as zeros."""
    apart = take_apart(kind, F.pad(stored, (0, 0, 0, -len(stored) % lanes)))
    values = _values(apart.q, KINDS[kind].bits, lanes)
    return _filled(torch.cat([_filled(_scales(apart, lanes)), values], 1))


def _scales(apart: Apart, lanes: int) -> torch.Tensor:
    """[strips, bytes]: of each block or SUPER, a field of all outputs after the other."""
    floats = unflatten(apart.floats, 0, (-1, lanes)).permute(0, 2, 3, 1, 4).flatten(2)
    if apart.steps is None:
        return floats.flatten(1)
    steps = unflatten(apart.steps, 0, (-1, lanes)).permute(0, 2, 3, 1).flatten(2)
    return torch.cat([floats, steps], 2).flatten(1)


def _values(q: torch.Tensor, bits: int, lanes: int) -> torch.Tensor:
    """q [rows, blocks, BLOCK] -> [strips, bytes]: planes of 4 bits, then of those above, [lanes, 4 inputs] in turn."""
    apart = unflatten(unflatten(q, 0, (-1, lanes)), -1, (8, 4))
    groups = apart.permute(0, 2, 3, 1, 4)  # [strips, blocks, 8, lanes, 4]
    if bits == 8:
        return groups.flatten(1)
    planes = [groups[:, :, :4] & 15 | groups[:, :, 4:] << 4]
    if bits > 4:
        each = 8 // (bits - 4)  # groups in a byte of what is above
        above = unflatten(groups >> 4, 2, (-1, each))
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8)[:, None, None]
        planes.append((above << shifts).sum(3, dtype=torch.uint8))
    return torch.cat(planes, 2).flatten(1)


def _filled(data: torch.Tensor) -> torch.Tensor:
    return F.pad(data, (0, -data.shape[1] % LINE))
