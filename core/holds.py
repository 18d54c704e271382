"""Holds: paths of ended calls that stay locked, because a program means to go on from them.

A hold is a lease that no request owns. It never costs progress: holds keep within a share of the pool, end when nobody
has used them for a while, and are given up, least recently used first, before a request is retracted or has to wait
for slots. So a hold is a hint; its loss costs computation and changes no output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from .batch import IntArray
from .errors import RequestError
from .interfaces import Cache, Lease


@dataclass(slots=True)
class Hold:
    """One locked path."""

    lease: Lease
    idle_s: float  # it ends when nobody has used it for so long
    due_s: float = 0.0  # when that will be


class Holds:
    """All holds of an engine, by name. Owned by the ledger, used on the loop's thread."""

    def __init__(
        self,
        cache: Cache,
        slots: int,
        *,
        idle_s: float,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` is the most that holds may lock, each slot counted once, of a pool's first group.

        A hold may be idle for `idle_s` seconds, or as much less as its call says. There are at most `most` holds where
        each keeps a state besides.
        """
        self._cache, self._slots, self._idle_s, self._clock = cache, slots, idle_s, clock
        self._most = most
        self._named: dict[str, Hold] = {}  # least recently used first
        self._ends: list[tuple[float, str]] = []  # heap: for each use of a hold, when it was to end then
        self._owners: IntArray = np.zeros(0, dtype=np.int32)  # holds that lock a slot
        self.tokens = 0  # slots that at least one hold locks
        self.revoked = 0  # holds given up for want of slots
        self.expired = 0

    def allow(self, idle_s: float | None) -> None:
        """Raises RequestError if a call may not have this limit of its own."""
        if idle_s is not None and not 0 < idle_s <= self._idle_s:
            raise RequestError(
                f"hold_idle_s must be above 0 and at most {self._idle_s:g} (schedule.hold_idle_s), got {idle_s:g}",
                param="hold_idle_s",
            )

    def keep(self, name: str, lease: Lease, idle_s: float | None = None) -> None:
        """Take over a lease under a name, in the place of an older one's."""
        self.drop(name)
        self._named[name] = Hold(lease, self._idle_s if idle_s is None else idle_s)
        self.touch(name)
        self._count(lease, 1)
        while self.tokens > self._slots or (self._most is not None and len(self._named) > self._most):
            self.revoke()

    def touch(self, name: str | None) -> None:
        """A call that will replace a hold has arrived: the hold is in use."""
        if name is not None and (hold := self._named.pop(name, None)) is not None:
            hold.due_s = self._clock() + hold.idle_s
            self._named[name] = hold
            heappush(self._ends, (hold.due_s, name))

    def drop(self, name: str) -> bool:
        """Release a hold; False if there is none of that name."""
        hold = self._named.pop(name, None)
        if hold is not None:
            self._count(hold.lease, -1)
            self._cache.release(hold.lease)
        return hold is not None

    def clear(self) -> None:
        """Release all."""
        for name in list(self._named):
            self.drop(name)

    def revoke(self) -> bool:
        """Give up the least recently used hold; False if there is none."""
        name = next(iter(self._named), None)
        self.revoked += name is not None
        return name is not None and self.drop(name)

    def make_way(self, slots: int, available: Callable[[], int]) -> bool:
        """Whether so many slots are available, if need be after giving up holds; none are given up in vain."""
        if slots > available() + self.tokens:
            return False
        while slots > available() and self.revoke():
            pass
        return slots <= available()

    def expire(self) -> None:
        """Release what nobody has used for too long. O(1) while that is nothing; called every step."""
        while self._ends and self._ends[0][0] < self._clock():
            due_s, name = heappop(self._ends)
            hold = self._named.get(name)
            if hold is not None and hold.due_s == due_s:  # else it has been used since, or is gone
                self.drop(name)
                self.expired += 1

    def stats(self) -> dict[str, int]:
        """Numbers for `Engine.stats`."""
        self.expire()
        return {
            "count": len(self._named),
            "tokens": self.tokens,
            "revoked": self.revoked,
            "expired": self.expired,
        }

    def check(self) -> None:
        """Verify the count of locked slots against the leases; raises AssertionError."""
        held = [self._locked(hold.lease) for hold in self._named.values()]
        locked = len(np.unique(np.concatenate(held))) if held else 0
        assert locked == self.tokens, f"holds lock {locked} slots, {self.tokens} are counted"

    def _locked(self, lease: Lease) -> IntArray:
        slots = self._cache.slots(lease)[0]
        return slots[slots >= 0]  # behind a window nothing is

    def _count(self, lease: Lease, by: int) -> None:
        """Slots of a leased path never change, so what is counted up is what is counted down."""
        slots = self._locked(lease)
        highest = int(slots.max(initial=-1)) + 1
        if highest > len(self._owners):
            self._owners = np.concatenate([self._owners, np.zeros(highest - len(self._owners), dtype=np.int32)])
        before = self._owners[slots]
        self._owners[slots] = before + by
        self.tokens += by * int((before == max(0, -by)).sum())
