"""Prompt lookup: where the end of a text stood before in the same text, and what followed there.

Saxena, Prompt Lookup Decoding (2023). The text is searched anew each time, by numpy: nothing to build for a prompt,
nothing to keep, and some ten microseconds for a thousand tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_PLACES = 8  # occurrences that are looked at, the latest


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Places in a text, behind which the same `match` tokens stand as at its end. The latest first."""

    text: array[int]
    at: tuple[int, ...]
    match: int

    def next(self, breadth: int) -> Iterable[tuple[int, float, Occurrences]]:
        """By how many of the places agree; the longer the match, the surer."""
        if len(self.at) == 1:  # most often
            at = self.at[0]
            if at == len(self.text):
                return ()
            after = Occurrences(self.text, (at + 1,), self.match + 1)
            return ((self.text[at], 1 / (1 + doubt(self.match)), after),)
        groups: dict[int, list[int]] = {}
        for at in self.at:
            if at < len(self.text):
                groups.setdefault(self.text[at], []).append(at + 1)
        if not groups:
            return ()
        total = sum(map(len, groups.values())) + doubt(self.match)
        best = sorted(groups.items(), key=lambda item: -len(item[1]))[:breadth]
        return [(token, len(at) / total, Occurrences(self.text, tuple(at), self.match + 1)) for token, at in best]


def doubt(match: int) -> float:
    """Weight of "something else follows", in occurrences: a long match leaves little of it."""
    return 2 / (match + 1)


def occurrences(text: array[int], shortest: int, longest: int) -> Occurrences | None:
    """Where the longest match of at least `shortest` tokens stands; beyond `longest` a match is as good as any."""
    n = len(text)
    if n <= shortest:
        return None
    seen = np.frombuffer(text, dtype=np.int32)  # gone when this returns: an array that is looked at cannot grow
    at = np.flatnonzero(seen[:-1] == seen[-1]) + 1
    length = 1
    while len(at) and length < longest:
        longer = at[at > length]
        longer = longer[seen[longer - length - 1] == seen[n - length - 1]]
        if not len(longer):
            break
        at, length = longer, length + 1
    if not len(at) or length < shortest:
        return None
    return Occurrences(text, tuple(at[-_PLACES:][::-1].tolist()), length)
