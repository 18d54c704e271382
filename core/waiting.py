"""The queue: who waits, who of them the policy may choose from, and whom it chooses, made safe and fair."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from .errors import PluginError
from .interfaces import Policy
from .parking import MAX_DEFERRED_STEPS, Maker, Parking
from .request import Request
from .siblings import Siblings


class WaitingQueue:
    """All waiting requests; those that wait for a prefix in the making are parked, and out of the policy's sight.

    With a policy that keeps the queue itself (capability `queue`) nothing here costs time for all who wait.
    """

    def __init__(self, policy: Policy, peek: Callable[[Request], int]) -> None:
        """`peek(request)` makes `request.matched` fresh."""
        self.error: Exception | None = None  # raised by the policy, or what it got wrong
        self._policy, self._peek = policy, peek
        self._keeps = "queue" in policy.capabilities
        self._waiting: dict[Request, None] = {}  # parked ones included
        self._parking = Parking()
        self._siblings = Siblings()
        # How many later ones may overtake a request. Where that is bounded: who may be the earliest that waits, as they
        # came, which is as many as the bound lets the first of them wait for, and the retracted ones, a heap.
        self._most: int | None = getattr(policy, "max_overtakes", None)
        self._arrived: deque[Request] = deque()
        self._returned: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._waiting])

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        self._waiting[request] = None
        if self._most is not None and request.retractions:
            heappush(self._returned, (request.arrival, request.retractions, request))
        elif self._most is not None:
            self._arrived.append(request)
        self._offer(request)

    def remove(self, request: Request) -> None:
        """It waits no more: `request.state` says why."""
        del self._waiting[request]
        if not self._parking.discard(request):
            self._withdraw(request)

    def park(self, request: Request, owner: Maker, until: int) -> None:
        """Keep a request out of the policy's sight until `owner` has computed `until` tokens, or has ended."""
        self._withdraw(request)
        self._parking.park(request, owner, until)

    def take_back(self) -> None:
        """Offer to the policy whom there is news for. Called once a step."""
        for request in self._parking.due():
            self._offer(request)

    def preempted(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Whom the policy names to give way to a waiting request; None without the capability `preempts`."""
        if "preempts" not in self._policy.capabilities:
            return None
        victim: Request | None = self._tell("preempt", request, running)
        if victim is not None and victim not in running:
            self.error = PluginError(f"{type(self._policy).__name__}.preempt() named a request that does not run")
            return None
        return victim

    def overdue(self, request: Request) -> Request | None:
        """Who has to start before `request` does, which would be one too many to overtake it; it is parked no more."""
        if self._most is None or (oldest := self._first_come()).arrival >= request.arrival - self._most:
            return None
        if self._parking.discard(oldest):
            self._offer(oldest)
        oldest.deferred = MAX_DEFERRED_STEPS
        return oldest

    def _first_come(self) -> Request:
        """The earliest arrival that waits; there is one."""
        while self._arrived and self._arrived[0] not in self._waiting:
            self._arrived.popleft()
        while self._returned and self._returned[0][2] not in self._waiting:
            heappop(self._returned)
        first = [*islice(self._arrived, 1), *(entry[2] for entry in self._returned[:1])]
        return min(first, key=lambda request: request.arrival)

    def order(self) -> Iterator[Request]:
        """Who waits and is not parked, best first, as far as it is read. Yields nobody who has left meanwhile.

        Whom it yields has to start or be parked before the next is asked for; else asking ends.
        """
        asked = [] if self._keeps else [request for request in self._waiting if request not in self._parking]
        if "matched" in self._policy.capabilities:
            for request in asked:
                self._peek(request)
        known = {*asked}
        named: dict[Request, int] = {}  # with its retractions: who started and came back at once may be named again
        taken: set[Request] = set()
        for request in self._policy_order(asked):
            again = named.get(request) == request.retractions
            if again or not (self._in_queue(request) if self._keeps else request in known):
                self._wrong_order()
                return
            named[request] = request.retractions
            turn = self._siblings.turn(request)
            if turn is not None and self._in_queue(turn):
                taken.add(turn)
                yield turn
        seen = taken.union(named)
        there = len(self._waiting) - len(self._parking) if self._keeps else sum(map(self._in_queue, asked))
        if self.error is None and there > sum(map(self._in_queue, seen)):
            self._wrong_order()
            return
        # last those whose place a shorter sibling took, when that one's own was gone from the queue with it
        yield from [request for request in named if request not in taken and self._in_queue(request)]

    def _in_queue(self, request: Request) -> bool:
        return request in self._waiting and request not in self._parking

    def _policy_order(self, waiting: list[Request]) -> Iterator[Request]:
        """What the policy yields; one that raises ends its order, and those it was to order fail."""
        try:
            yield from self._policy.order(waiting)
        except Exception as error:
            self.error = error

    def _wrong_order(self) -> None:
        name = type(self._policy).__name__
        self.error = PluginError(f"{name}.order() did not return a permutation of the waiting requests")

    # --- what the policy is told

    def _offer(self, request: Request) -> None:
        """The policy may choose a waiting request from now on."""
        self._siblings.add(request)
        if self._keeps:
            if "matched" in self._policy.capabilities:
                self._peek(request)
            self._tell("add", request)

    def _withdraw(self, request: Request) -> None:
        """It may not: it runs, has ended, or is parked."""
        self._siblings.remove(request)
        if self._keeps:
            self._tell("remove", request)

    def _tell(self, method: str, *arguments: Any) -> Any:
        """Call a method that only some policies have; one that raises is the loop's to deal with."""
        try:
            return getattr(self._policy, method)(*arguments)
        except Exception as error:
            self.error = error
            return None
