"""A queue by a rank that never changes while a request waits: what policies share that look at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from .request import Request

_SLACK = 32  # stale heap entries tolerated before a rebuild, however few are live


class RankedQueue:
    """The waiting requests, smallest rank first, ties in order of arrival. O(log n) for each that comes or is read.

    The heap is lazy: what has left is dropped when it comes to the top.
    """

    def __init__(self, rank: Callable[[Request], Any]) -> None:
        """`rank(request)` is comparable; asked once when a request is added."""
        self._rank = rank
        self._live: dict[Request, int] = {}  # the serial number of its entry
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._aside: list[tuple[Any, int, int, Request]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        self._serial += 1
        self._live[request] = self._serial
        heappush(self._heap, (self._rank(request), request.arrival, self._serial, request))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if self._live.get(entry[3]) == entry[2]]
            heapify(self._heap)

    def remove(self, request: Request) -> None:
        """It waits no more. Raises KeyError if it was never added."""
        del self._live[request]

    def first(self) -> Request | None:
        """The best request that `order` has not set aside."""
        while self._heap:
            _, _, serial, request = self._heap[0]
            if self._live.get(request) == serial:
                return request
            heappop(self._heap)
        return None

    def order(self) -> Iterator[Request]:
        """Best first, each request once; what is added and removed meanwhile counts at once."""
        self.restore()
        while (request := self.first()) is not None:
            self.pass_over()
            yield request
        self.restore()

    def pass_over(self) -> None:
        """Set the best request aside until `restore`."""
        if self.first() is not None:
            self._aside.append(heappop(self._heap))

    def restore(self) -> None:
        """Take back what was set aside."""
        for entry in self._aside:
            if self._live.get(entry[3]) == entry[2]:
                heappush(self._heap, entry)
        self._aside.clear()
