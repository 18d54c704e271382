"""The texts of `bench.tree`, and its clock: shared with other engines' trees, whose interpreters have no phloem."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

RUN = 16  # tokens of a node
FANOUT = 8
ROUNDS = 8
BATCH = 500
VOCAB = 50_000
LONG = 4_000

T = TypeVar("T")


class Texts:
    """Texts that lead to `nodes` nodes, parents first. The same for the same seed, whoever asks."""

    def __init__(self, nodes: int, seed: int, typecode: str = "i") -> None:
        self.rng = random.Random(seed)
        self.runs = 0
        self._typecode = typecode
        self.all = list(self._grow(nodes))

    def _grow(self, nodes: int) -> Iterator[array[int]]:
        level = [self.text([])]
        made = 0
        while made < nodes:
            below = [self.longer(parent) for parent in level for _ in range(FANOUT)][: nodes - made]
            yield from below
            made += len(below)
            level = below

    def text(self, tokens: Sequence[int]) -> array[int]:
        """Tokens as this tree wants them."""
        return array(self._typecode, tokens)

    def longer(self, text: array[int]) -> array[int]:
        """`text` and one more run of random tokens, whose first is new: no two runs share a beginning by accident."""
        self.runs += 1
        return text + self.text([VOCAB + self.runs, *self.rng.choices(range(VOCAB), k=RUN - 1)])

    def sample(self) -> list[array[int]]:
        """Texts of random nodes."""
        return self.rng.choices(self.all, k=BATCH)

    def grown(self) -> list[list[array[int]]]:
        """For every round texts of nodes that are not there yet, each below a random one."""
        return [[self.longer(text) for text in self.sample()] for _ in range(ROUNDS)]

    def long(self) -> array[int]:
        """A prefix of LONG tokens."""
        return self.text(self.rng.choices(range(VOCAB), k=LONG))


def rate(operation: Callable[[T], object], rounds: Sequence[Sequence[T]]) -> float:
    """Operations per second of CPU time in the best round."""
    best = float("inf")
    for items in rounds:
        start = time.process_time()
        for item in items:
            operation(item)
        best = min(best, (time.process_time() - start) / len(items))
    return 1.0 / best
