"""A finite automaton over tokens, as arrays: what outlines compiles, in the form in which it is sent and used."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from ._bits import Mask

_ROW_BYTES = 4 * 1024**2  # of masks that are remembered
_FORCED_BYTES = 256  # `forced` looks no further


class Automaton:
    """S states and M transitions. Immutable but for remembered masks; read on one thread. State 0 is the start."""

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
        after: npt.NDArray[np.int32],
        byte: npt.NDArray[np.int16],
        final: npt.NDArray[np.bool_],
    ) -> None:
        """`tokens[offsets[s] : offsets[s + 1]]`, ascending, lead from state s to the `targets` beside them.

        `final` [S]: the text may end. `byte` [S]: the only byte that may follow, -1 where there are several, none, or
        the text may end; `after` [S]: the state behind it.
        """
        self.arrays = (offsets, tokens, targets, after, byte, final)  # widest numbers first, so that all lie aligned
        # Reading one number through `data`, a memoryview, takes a third of the time that it takes from an array.
        self._offsets, self._tokens, self._targets = offsets.data, tokens.data, targets.data
        self._after, self._byte, self.final = after.data, byte.data, final.data
        self._rows: OrderedDict[int, Mask] = OrderedDict()

    def next(self, state: int, token: int) -> int | None:
        """The state behind a token; None where it is not allowed."""
        end = self._offsets[state + 1]
        i = bisect_left(self._tokens, token, self._offsets[state], end)
        return int(self._targets[i]) if i < end and self._tokens[i] == token else None

    def count(self, state: int) -> int:
        """Tokens that are allowed, not counting end tokens."""
        return int(self._offsets[state + 1] - self._offsets[state])

    def row(self, state: int, width: int, ends: Mask) -> Mask:
        """The bitmask [width] of what is allowed in a state; `ends` are the bits of the end tokens."""
        row = self._rows.get(state)
        if row is None:
            bits = np.zeros(32 * width, dtype=np.bool_)
            bits[self.arrays[1][self._offsets[state] : self._offsets[state + 1]]] = True
            row = np.packbits(bits, bitorder="little").view(np.int32)
            if self.final[state]:
                row |= ends
            self._rows[state] = row
            if len(self._rows) > max(64, _ROW_BYTES // row.nbytes):
                self._rows.popitem(last=False)
        return row

    def forced(self, state: int) -> bytes:
        """The bytes that every continuation begins with, as far as the language goes, at most 256 of them."""
        found = bytearray()
        while self._byte[state] >= 0 and len(found) < _FORCED_BYTES:
            found.append(self._byte[state])
            state = self._after[state]
        return bytes(found)

    def dump(self) -> bytes:
        """For `load`: the numbers of states and transitions, then the arrays."""
        sizes = np.array([len(self.final), len(self._tokens)], dtype=np.int64)
        return b"".join(array.tobytes() for array in (sizes, *self.arrays))

    @classmethod
    def load(cls, data: bytes) -> Automaton:
        """An automaton over the bytes themselves: nothing is copied."""
        states, transitions = np.frombuffer(data, np.int64, 2).tolist()
        shapes: tuple[tuple[type[Any], int], ...] = (
            (np.int64, states + 1),
            (np.int32, transitions),
            (np.int32, transitions),
            (np.int32, states),
            (np.int16, states),
            (np.bool_, states),
        )
        arrays: list[Any] = []
        at = 16
        for kind, length in shapes:
            arrays.append(np.frombuffer(data, kind, length, at))
            at += arrays[-1].nbytes
        return cls(*arrays)
