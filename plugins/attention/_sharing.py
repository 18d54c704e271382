"""Which parts of their contexts the segments of a step have in common: the step's own radix tree, over slots."""

from __future__ import annotations

from typing import NamedTuple

from phloem.batch import IntArray

MIN_SAVED = 512  # context entries that sharing must save the reading of, to be worth a piece of its own
SHARED_QUERIES = 64  # segments with more queries than this make good use of what they read alone


class Shared(NamedTuple):
    """Entries [low, high) of all members' contexts are the same slots."""

    members: list[int]  # segments
    low: int
    high: int


def shareable(pasts: list[int], q_lens: list[int]) -> list[int]:
    """Of each segment's past, what it may share."""
    return [past if q <= SHARED_QUERIES else 0 for past, q in zip(pasts, q_lens, strict=True)]


def find_shared(table: IntArray, pasts: list[int], unit: int = 1) -> tuple[list[Shared], list[int]]:
    """Shared ranges, and for each segment where its unshared rest begins.

    `table` [S, max_kv]; `pasts[s]` entries of row s come before the segment's own tokens, and only those are shared:
    every query of every member sees them all. Ranges of one segment follow each other from 0 without a gap, and end at
    multiples of `unit`.
    """
    found: list[Shared] = []
    begins = [0] * len(pasts)
    stack = [(list(range(len(pasts))), 0)]
    while stack:
        members, low = stack.pop()
        if len(members) < 2:
            continue
        limit = min(pasts[member] for member in members)
        rows = table[members, low:limit]
        differs = (rows != rows[0]).any(0)
        common = low + int(differs.argmax()) if differs.any() else limit
        end = common - common % unit
        if (len(members) - 1) * (end - low) >= MIN_SAVED:
            found.append(Shared(members, low, end))
            low = end
            for member in members:
                begins[member] = end
        branches: dict[int, list[int]] = {}
        for member in members:
            if common < pasts[member]:
                branches.setdefault(int(table[member, common]), []).append(member)
        stack.extend((branch, low) for branch in branches.values())
    return found, begins
