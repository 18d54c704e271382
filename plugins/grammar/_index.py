"""Builds an automaton over tokens from a regular expression, with outlines-core: on a compile worker only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from phloem.errors import RequestError

from ._automaton import Automaton

if TYPE_CHECKING:
    from outlines_core import Index, Vocabulary

MAX_SIZE = 100_000  # characters of a pattern once its counts are written out
MAX_TRANSITIONS = 100_000_000
_ITEM = re.compile(
    r"\\(?:u\{[0-9a-f]+\}|x[0-9a-f]{2}|[pP]\{\w+\}|.)|\[\^?(?:\\(?:u\{[0-9a-f]+\}|.)|[^\]\\])*\]|\{(\d+)(,?)(\d*)\}"
    r"|\((?:\?[a-z-]*:)?|.",
    re.DOTALL,
)


class Indexer:
    """Compiles patterns over one vocabulary. Making one takes 10 ms for 50,000 tokens."""

    def __init__(self, texts: Mapping[int, bytes], size: int, end: int) -> None:
        """`texts`: bytes of the tokens that are text, all below `size`; `end`: some token that is none.

        Every single byte is in the vocabulary once more, from `size` on: so that each state's bytes are known, and
        the library, which fails where no token fits, finds one.
        """
        from outlines_core import Vocabulary

        tokens: dict[bytes, list[int]] = {bytes([byte]): [size + byte] for byte in range(256)}
        for token, text in texts.items():
            tokens.setdefault(text, []).append(token)
        self._size, self._end = size, end
        self._vocabulary: Vocabulary = Vocabulary(end, tokens)

    def build(self, pattern: str, kind: str) -> Automaton:
        """The texts that match all of `pattern`, in Rust's syntax.

        Raises RequestError(param=kind) for what is too large, and where nothing matches. The library takes, at a
        state, the vocabulary's length in steps, and 10 bytes for each token that fits.
        """
        from outlines_core import Index

        size = expanded_size(pattern)
        if size > MAX_SIZE:
            raise RequestError(
                f"{kind}: its counts written out, the pattern has {size:,} characters, at most {MAX_SIZE:,} make an "
                "automaton",
                hint="lower the counts, or use another grammar backend",
                param=kind,
            )
        # The library drops alternatives after one that matches ("a|ab" has no "ab") unless matches end at \z, and
        # cannot start where the end is a match; a byte before the text avoids that.
        try:
            index = Index(rf"\x00(?:{pattern})\z", self._vocabulary)
        except ValueError as error:
            raise RequestError(f"{kind}: {_reason(error)}", param=kind) from None
        start = index.get_next_state(index.get_initial_state(), self._size)
        return self._arrays(index, start, kind)

    def _arrays(self, index: Index, start: int, kind: str) -> Automaton:
        """All states that can be reached, renumbered, the bytes added to the vocabulary taken out."""
        numbers, order = {start: 0}, [start]
        offsets, tokens, targets = [0], list[np.ndarray](), list[np.ndarray]()
        final, byte, after = list[bool](), list[int](), list[int]()
        for state in order:
            allowed = np.array(index.get_allowed_tokens(state) or (), dtype=np.int64)
            allowed = np.sort(allowed[allowed != self._end])
            following = np.fromiter(map(partial(index.get_next_state, state), allowed.tolist()), np.int64, len(allowed))
            for number in np.unique(following).tolist():
                if number not in numbers:
                    numbers[number] = len(order)
                    order.append(number)
            places, inverse = np.unique(following, return_inverse=True)
            renumbered = np.array([numbers[number] for number in places.tolist()], dtype=np.int32)[inverse]
            known = int(np.searchsorted(allowed, self._size))
            final.append(bool(index.is_final_state(state)))
            single = len(allowed) - known == 1 and not final[-1]
            byte.append(int(allowed[-1]) - self._size if single else -1)
            after.append(int(renumbered[-1]) if single else -1)
            tokens.append(allowed[:known].astype(np.int32))
            targets.append(renumbered[:known].astype(np.int32))
            offsets.append(offsets[-1] + known)
            if offsets[-1] > MAX_TRANSITIONS:
                raise RequestError(
                    f"{kind}: the automaton has more than {MAX_TRANSITIONS:,} transitions",
                    hint="simplify it, or use another grammar backend",
                    param=kind,
                )
        return Automaton(
            np.array(offsets, dtype=np.int64),
            np.concatenate(tokens),
            np.concatenate(targets),
            np.array(after, dtype=np.int32),
            np.array(byte, dtype=np.int16),
            np.array(final, dtype=np.bool_),
        )


def expanded_size(pattern: str) -> int:
    """Atoms of a pattern in Rust's syntax when every count is written out, about."""
    stack, last = [0], 0
    for match in _ITEM.finditer(pattern):
        item = match[0]
        if match[1] is not None:
            stack[-1] += last * (max(int(match[1]), int(match[3] or 0)) + (match[2] != "" and match[3] == "") - 1)
        elif item.startswith("("):
            stack.append(0)
        elif item == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1] += last
        elif item not in "|*+?":
            last = 1
            stack[-1] += 1
    return stack[0]


def _reason(error: ValueError) -> str:
    """The library names its own numbers of states; what a user wants to know is simpler."""
    text = str(error)
    return "no text satisfies a part of it" if "Found no transitions" in text else f"no automaton can be built: {text}"
