"""Texts of the programs: sentences put together from lists of words, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()).split(", "))


WHO = _words("""the miller, a young botanist, the lighthouse keeper, an old gardener, the ferryman, the village teacher,
    a travelling clockmaker, a patient beekeeper, the night watchman, a retired surveyor""")
DID = _words("measured, described, repaired, carried home, drew, forgot, sold, watched, painted, moved")
WHAT = _words("""the crooked bridge, a basket of pears, the tallest spruce, an unfinished map, the brass telescope,
    a row of lindens, the flooded cellar, a letter without a stamp, the eastern wall, a sleeping owl""")
WHEN = _words("""before the first frost, on a windless morning, during the long drought, after the harvest, at dusk,
    in the year of the flood, while the others slept, a week too late, between two storms, in April""")
WHY = _words("""because nobody else would, to settle a bet, for the sake of the children, out of habit, to save time,
    as the contract demanded, without a clear reason, to please the mayor, for a small fee, to be alone""")
TOPICS = _words("rivers, orchards, clocks, bridges, lighthouses, maps, bees, mills, telescopes, forests")


class Prose:
    """A source of sentences. Equal seeds give equal texts."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def sentence(self) -> str:
        """About fifteen words."""
        parts = [self.pick(part) for part in (WHO, DID, WHAT, WHEN, WHY)]
        return " ".join(parts).capitalize() + "."

    def text(self, sentences: int) -> str:
        """So many sentences."""
        return " ".join(self.sentence() for _ in range(sentences))

    def question(self) -> str:
        """A question about the world of the sentences."""
        return f"Why was it {self.pick(WHO)} who {self.pick(DID)} {self.pick(WHAT)} {self.pick(WHEN)}?"

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return self._random.choice(options)

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """So many different ones."""
        return self._random.sample(options, count)
