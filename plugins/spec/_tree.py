"""Draft trees grown best first: whatever is most likely to be reached is proposed, up to a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from phloem.drafts import Draft

LEAST = 0.02  # a path less likely than this is not worth a row at any price


class Place(Protocol):
    """Somewhere in remembered text."""

    def next(self, breadth: int) -> Iterable[tuple[int, float, Place]]:
        """Tokens that may follow, at most `breadth`: each with its probability, and the place after it."""


def grow(places: Sequence[Place], budget: int, breadth: int) -> Draft | None:
    """The most likely tree of at most `budget` nodes, `breadth` below each, that continues any of `places`, or None.

    Places that agree on a path share its nodes; the more confident one is believed.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    index: dict[tuple[int, int], int] = {}
    branches = Counter[int]()
    heap: list[tuple[float, int, int, int, float, Place]] = []  # -probability of the path, then in order of arrival
    pushed = 0

    def offer(place: Place, parent: int, reached: float) -> None:
        nonlocal pushed
        for token, likely, after in place.next(breadth):
            if reached * likely >= LEAST:
                pushed += 1
                heappush(heap, (-reached * likely, pushed, parent, token, likely, after))

    for place in places:
        offer(place, -1, 1.0)
    while heap:
        path, _, parent, token, likely, after = heappop(heap)
        node = index.get((parent, token))
        if node is None:
            if len(tokens) == budget:
                break
            if branches[parent] == breadth:
                continue
            branches[parent] += 1
            node = index[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            confidence.append(likely)
        offer(after, node, -path)
    return Draft(tuple(tokens), tuple(parents), confidence=tuple(confidence)) if tokens else None
