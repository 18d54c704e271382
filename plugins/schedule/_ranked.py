"""What policies that keep the queue themselves have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from phloem.ranked import RankedQueue
from phloem.request import Request


class KeptQueue(Protocol):
    """What a `QueueingPolicy` keeps its requests in."""

    def add(self, request: Request) -> None:
        """A request waits from now on."""

    def remove(self, request: Request) -> None:
        """It waits no more. Raises KeyError if it was never added."""

    def order(self) -> Iterator[Request]:
        """Best first, each request once; what is added and removed meanwhile counts at once."""


class QueueingPolicy:
    """A policy that keeps the queue itself: what all of them have in common."""

    capabilities = frozenset({"queue"})

    def __init__(self, queue: KeptQueue) -> None:
        self._queue = queue

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """That of the queue."""
        return self._queue.order()

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The core's choice: the latest arrival."""
        return None

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        self._queue.add(request)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        self._queue.remove(request)


class RankedPolicy(QueueingPolicy):
    """A policy whose order key is a constant rank; ties keep arrival order."""

    def __init__(self, rank: Callable[[Request], Any]) -> None:
        super().__init__(RankedQueue(rank))
