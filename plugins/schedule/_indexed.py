"""What the policies that order by the waiting index have in common."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from phloem.request import Namespace, Request

from ._index import WaitingIndex


class IndexedPolicy:
    """A policy whose order key is a constant rank in tokens minus the tokens that are cached."""

    capabilities = frozenset({"matched", "queue", "listens"})

    def __init__(self, page_size: int, rank: Callable[[Request], float]) -> None:
        self._index = WaitingIndex(page_size, rank)

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Smallest key first; ties keep arrival order."""
        return self._index.order()

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The core's choice: the latest arrival."""
        return None

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        self._index.add(request)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        self._index.remove(request)

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """`tokens` is a cached prefix now."""
        self._index.stored(namespace, tokens, start)

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Of `tokens` only the first `start` are cached."""
        self._index.removed(namespace, tokens, start)

    def cleared(self) -> None:
        """Nothing is cached."""
        self._index.cleared()
