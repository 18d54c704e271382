"""What the policies that order by the waiting index have in common."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from phloem.request import Namespace, Request

from ._index import WaitingIndex
from ._ranked import QueueingPolicy


class IndexedPolicy(QueueingPolicy):
    """A policy whose order key is a constant rank in tokens minus its cached tokens; ties keep arrival order."""

    capabilities = frozenset({"matched", "queue", "listens"})

    def __init__(self, page_size: int, rank: Callable[[Request], float]) -> None:
        self._index = WaitingIndex(page_size, rank)
        super().__init__(self._index)

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """`tokens` is a cached prefix now."""
        self._index.stored(namespace, tokens, start)

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Of `tokens` only the first `start` are cached."""
        self._index.removed(namespace, tokens, start)

    def cleared(self) -> None:
        """Nothing is cached."""
        self._index.cleared()
