"""Which slots hold the states of recurrent layers: those of running requests, and when they become the cache's.

A slot holds the state after some prefix of a text, and has one owner, as a page of KV has. A running request owns

- the state after its computed tokens, from which it goes on, unless that is the cache's at the end of its lease;
- that after its last whole page: a request is published up to a place where there is a state, or not at all;
- those that its steps under way will leave, one for each node of a draft included: the accepted one becomes the
  request's state by its number, and the others are free again in the same step;
- those at its *marks*, where others are expected to go on: the last place of its prompt that a match may end at, the
  place where its prompt parts from cached texts, and where a waiting request parts from it. With tiers below the cache,
  which keep states between blocks only, also the last of these before each, and before the end of its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from .batch import IntArray, Segment
from .interfaces import Cache, Narrows
from .pool import SlotPool
from .request import Request

DRAFTING = 4  # requests that always find slots for drafts of full length


def per_request(page: int, *, ahead: bool) -> int:
    """Most slots that a running request needs: where it is and where each step under way leads, and the page's ends."""
    return (2 + ahead) * (1 if page == 1 else 2)


def pool_size(tokens: int, page: int, *, running: int, ahead: bool, drafts: int, every: int) -> tuple[int, int]:
    """Slots of the pool, and how many of them the cache may keep: one for every so many tokens.

    Beside what it needs each running request has room for one mark.
    """
    snapshots = -(-tokens // every)
    return running * (per_request(page, ahead=ahead) + 1) + DRAFTING * drafts + snapshots, snapshots


def start_slot(request: Request, start: int) -> int:
    """The slot of the state after the first `start` tokens, -1 for that of the empty text."""
    slot = request.states.get(start)
    if slot is None and start and request.lease is not None and start == request.lease.length:
        slot = request.snapshot
    assert slot is not None or not start, f"{request!r} starts at {start} and has states {sorted(request.states)}"
    return -1 if slot is None else slot


def kept(segment: Segment) -> Iterator[tuple[int, int]]:
    """(query of the segment, slot) of the states it leaves, ascending."""
    for length, slot in sorted(segment.request.states.items()):
        if segment.start < length <= segment.start + segment.rows:
            yield length - segment.start - 1, slot


class StateSlots:
    """The bookkeeping of one engine. Part of the ledger, used on the loop's thread."""

    def __init__(
        self,
        cache: Cache,
        pool: SlotPool,
        group: int,
        page: int,
        *,
        rows: int,
        each: int,
        snapshots: int,
        pinnable: int,
    ) -> None:
        """At most `rows` requests run, `each` as `per_request` says; the cache keeps at most `snapshots` states.

        Pins may keep `pinnable` of these.
        """
        self._cache, self.pool, self.group, self._page = cache, pool, group, page
        self._narrows = cast("Narrows", cache) if "narrows" in cache.capabilities else None
        self._shares = "sharing" in cache.capabilities
        self._rows, self._each = rows, each
        self._running = 0
        self.block = 0  # tokens of a block, where there are tiers
        self.loading: list[int] = []  # slots that a tier is filling
        self.snapshots, self.pinnable = snapshots, pinnable

    def _floor(self, tokens: int) -> int:
        return tokens // self._page * self._page

    # --- the life of a request

    def admit(self, request: Request, leased: IntArray, shared: int) -> None:
        """A request has its lease, whose slots of this group these are, and is about to run."""
        self._running += 1
        request.snapshot = int(leased[-1]) if len(leased) else -1
        length = len(request.tokens)
        for at in (shared, length - 1, *([length] if request.call.pin is not None else [])):
            self.mark(request, self._floor(at))
        for at in (shared, length - 1) if self.block else ():
            self.mark(request, at // self.block * self.block)

    def mark(self, request: Request, at: int) -> bool:
        """Publish a request at `at` tokens, whole pages, once it is there; False if it is past that, or slots lack."""
        if at in request.marks:
            return True
        passed = at <= request.computed + request.in_flight
        if passed or not self._shares or not self._take(request, [at], spare=True):
            return False
        request.marks.add(at)
        return True

    def extend(self, request: Request, lengths: Iterable[int], *, spare: bool) -> bool:
        """Have slots for the states after `lengths`, and after the pages that end there; False if there are none.

        With `spare` only slots that no running request will need, and no cached one.
        """
        ends = {end for length in lengths for end in (length, self._floor(length))}
        done = request.computed + request.in_flight
        return self._take(request, sorted(end for end in ends if end > done), spare=spare)

    def _take(self, request: Request, lengths: Sequence[int], *, spare: bool) -> bool:
        new = [length for length in lengths if length not in request.states]
        if spare and self.pool.free - self._reserve < len(new):
            return False
        if self.pool.free < len(new):
            self._cache.evict(len(new) - self.pool.free, self.group)
        slots = self.pool.alloc(len(new))
        if slots is None:
            return False
        request.states.update(zip(new, slots.tolist(), strict=True))
        return True

    def settle(self, request: Request) -> None:
        """After a step: what it has passed, and what drafts left in vain, is free again."""
        assert request.lease is not None
        done, page_end = request.computed, self._floor(request.computed)
        self._keep_block_end(request)
        ahead = request.in_flight > 0  # who has a step under way was not drafting in this one
        vain = [n for n in request.states if n < done or (n >= len(request.tokens) and not ahead)]
        self._give(request, [n for n in vain if n not in (done, page_end) and n not in request.marks])
        if request.snapshot >= 0 and page_end > request.lease.length:
            request.snapshot = -1
            if self._narrows is not None:
                self._narrows.narrow(request.lease, request.lease.length, self.group)

    def _keep_block_end(self, request: Request) -> None:
        """Of what a request writes the state after the last whole block stays, in the place of the one before."""
        end = request.computed // self.block * self.block if self.block else 0
        if end > request.prompt_len and end in request.states and end not in request.marks:
            request.marks = {at for at in request.marks if at <= request.prompt_len or at > end}
            if self.pool.free > self._reserve:
                request.marks.add(end)

    def release(self, request: Request) -> None:
        """Everything that is still the request's."""
        self._running -= 1
        self._give(request, list(request.states))
        request.marks.clear()
        request.snapshot = -1

    def _give(self, request: Request, lengths: Sequence[int]) -> None:
        if lengths:
            self.pool.release(np.array([request.states.pop(n) for n in lengths], dtype=np.int32))

    # --- publishing

    def due(self, request: Request, length: int, *, ends: bool) -> list[int]:
        """Where a request is to be published, of what it has computed, ascending; `ends`: it leaves."""
        assert request.lease is not None
        places = {at for at in request.marks if at <= length} | ({self._floor(length)} if ends else set())
        if not self._shares:  # nothing is kept
            return []
        request.marks -= places
        return sorted(at for at in places if at > request.lease.length and at in request.states)

    def offer(self, request: Request, at: int) -> IntArray | None:
        """The slots to publish [at]: the state is the cache's from now on. None where it has no room for one."""
        if self._full and not self._cache.evict(1, self.group):
            return None
        slots: IntArray = np.full(at, -1, dtype=np.int32)
        slots[-1] = request.states.pop(at)
        return slots

    @property
    def _full(self) -> bool:
        """The cache has all the states that it may keep, those on their way to it included."""
        return sum(self._cache.counts()[self.group]) + len(self.loading) >= self.snapshots

    def take(self) -> IntArray | None:
        """A slot for a state that a tier brings back; None where the cache has no room for it, or requests need all."""
        if self._full or self.pool.free <= self._reserve:
            self._cache.evict(1, self.group)
        if self._full or self.pool.free <= self._reserve:
            return None
        slot = self.pool.alloc(1)
        assert slot is not None, "a free slot"
        self.loading.append(int(slot[0]))
        return slot

    def landed(self, slot: IntArray, *, kept: bool) -> None:
        """What `take` gave is the cache's now (`kept`), or free."""
        self.loading.remove(int(slot[0]))
        if not kept:
            self.pool.release(slot)

    def published(self, request: Request, slots: IntArray) -> None:
        """The cache's slots of what is newly leased: the last is the state at its end."""
        if len(slots):
            request.snapshot = int(slots[-1])

    # --- counts

    @property
    def _reserve(self) -> int:
        """Free slots that the next step of those who run needs, and all steps of those who may start."""
        return self._running * (self._each // 2) + (self._rows - self._running) * self._each

    def usage(self, running: Iterable[Request]) -> dict[str, int]:
        """Total, free, evictable, protected and leased (owned by running requests) slots."""
        counts = self._cache.counts()[self.group]
        return {
            "total": self.pool.total,
            "free": self.pool.free,
            "evictable": counts.evictable,
            "protected": counts.protected,
            "leased": sum(len(request.states) for request in running) + len(self.loading),
        }

    def owners(self, running: Iterable[Request]) -> list[int]:
        """Slots being filled, and those of running requests, which all have a state to go on from.

        Raises AssertionError.
        """
        owned = [*self.loading]
        for request in running:
            start_slot(request, request.computed)
            owned += request.states.values()
        return owned
