"""Waiting requests that wait for a prefix a running one is computing: out of the queue until there is news for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from .request import Request, State

# Requests that are parked, and that come back, in one step: both cost time of it.
MOST_PER_STEP = 64
# Bound on waiting for others' prefixes, all times together.
MAX_DEFERRED_STEPS = 256


class Maker(Protocol):
    """Who is bringing a prefix to the pools: a running request, or a ticket of a tier."""

    state: State
    retractions: int
    computed: int


@dataclass(slots=True, eq=False)
class Parked:
    """One parked request."""

    request: Request
    since: int  # step


@dataclass(slots=True, eq=False)
class Owner:
    """Who makes a prefix, and those that wait until it has what they share with it, the shortest first."""

    request: Maker
    epoch: int  # its retractions; one more since then, and the prefix may never come
    behind: list[tuple[int, int, Parked]]

    @property
    def gone(self) -> bool:
        """It has ended, or was retracted."""
        return self.request.state is not State.RUNNING or self.request.retractions != self.epoch


class Parking:
    """O(owners) a step, and O(log parked) for each request that is parked or comes back."""

    def __init__(self) -> None:
        self._parked: dict[Request, Parked] = {}
        self._owners: dict[Maker, Owner] = {}
        self._deadlines: list[tuple[int, int, Parked]] = []
        self._step = 0
        self._serial = 0  # makes entries of heaps comparable

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, request: Request) -> bool:
        return request in self._parked

    def park(self, request: Request, owner: Maker, until: int) -> None:
        """Keep a request out of the queue until `owner` has computed `until` tokens."""
        parked = self._parked[request] = Parked(request, self._step)
        found = self._owners.get(owner)
        if found is None or found.gone:
            found = self._owners[owner] = Owner(owner, owner.retractions, found.behind if found else [])
        self._serial += 1
        heappush(found.behind, (until, self._serial, parked))
        heappush(self._deadlines, (self._step + MAX_DEFERRED_STEPS - request.deferred, self._serial, parked))

    def discard(self, request: Request) -> bool:
        """A request is parked no more, for whatever reason; False if it was not."""
        parked = self._parked.pop(request, None)
        if parked is not None:
            request.deferred += max(1, self._step - parked.since)
        return parked is not None

    def due(self) -> Iterator[Request]:
        """Those that come back now, parked no more when yielded; at most `MOST_PER_STEP`. Called once a step."""
        self._step += 1
        left = MOST_PER_STEP
        for parked in self._candidates():
            if self._parked.get(parked.request) is parked:
                self.discard(parked.request)
                yield parked.request
                left -= 1
                if not left:
                    return

    def _candidates(self) -> Iterator[Parked]:
        """What is taken from the heaps, stale entries included."""
        while self._deadlines and self._deadlines[0][0] <= self._step:
            yield heappop(self._deadlines)[2]
        for owner in list(self._owners.values()):
            while owner.behind and (owner.gone or owner.behind[0][0] <= owner.request.computed):
                yield heappop(owner.behind)[2]
            if not owner.behind:
                del self._owners[owner.request]
