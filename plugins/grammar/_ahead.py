"""Forced text that a matcher has found already, so that the library is not asked for it again at every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST = 4096  # bytes that are told at once: no step has room for more
_KEPT = 3  # finds: the one that the text stands in, and those that a draft has looked at ahead of it


class _Find(NamedTuple):
    tokens: int  # accepted before it
    begin: int  # bytes before it
    text: bytes


class Ahead:
    """Where a text stands, in bytes, and what is forced from there on.

    What is forced after some tokens stays so until these are taken back: every token that the grammar takes later
    follows it. A library walks it all to tell it, 3 us a byte at worst, and may be asked several times a step.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` [vocab]: bytes of each token, 0 of those that are no text."""
        self._lengths = lengths
        self._ends = [0]  # bytes after each token that was accepted, none of them first
        self._finds: list[_Find] = []

    def __len__(self) -> int:
        """Tokens accepted."""
        return len(self._ends) - 1

    def accept(self, token: int) -> None:
        """A token that the grammar took."""
        self._ends.append(self._ends[-1] + self._lengths[token])

    def rollback(self, tokens: int) -> None:
        """The last ones are taken back, and what was found behind them."""
        del self._ends[len(self._ends) - tokens :]
        while self._finds and self._finds[-1].tokens > len(self):
            self._finds.pop()

    def known(self) -> bytes | None:
        """The next bytes of what was found; None where nothing is known."""
        if not self._finds:
            return None
        at = self._ends[-1] - self._finds[-1].begin
        return self._finds[-1].text[at : at + _MOST] or None

    def found(self, text: bytes) -> bytes:
        """The library has told all that is forced here; returns as much of it as `known` would."""
        if text:
            self._finds = [*self._finds[1 - _KEPT :], _Find(len(self), self._ends[-1], text)]
        return text[:_MOST]

    def fork(self) -> Ahead:
        """An independent copy."""
        twin = Ahead(self._lengths)
        twin._ends, twin._finds = list(self._ends), list(self._finds)
        return twin
