"""Bringing blocks back into the pools: a ticket for each prefix that is on its way, while other requests' steps go on.

    reading   blocks that lie in the storage only are read and checked, on a thread; nothing in the pools is held
    filling   the path before them is leased, slots are allocated, and rows are copied to them, on another thread
    done      the cache gets the slots, as from a request that computed them; whoever waited is ready to start

Where layers keep a state of a text, that after the last block comes with them, and a load ends there and nowhere else.

What fails on the way gives everything back, and whoever waited computes the prefix itself. The loop's thread only
allocates, publishes and gives back.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import windows as win
from .batch import IntArray
from .interfaces import Lease
from .ledger import Ledger
from .request import Request, State
from .tier_blocks import Block, Layout, state_name
from .tier_shelf import Shelf, Worker

log = logging.getLogger(__name__)
# A prefix that takes longer to be read is given up; no request waits much longer for one.
READ_S = 10.0


@dataclass(slots=True, eq=False)
class Ticket:
    """Blocks of one prefix on their way. For those parked behind it, it is like a request that computes them."""

    request: Request  # who asked first
    keys: array[int]
    limit: int  # most tokens of the prefix that are of use
    first: int  # number of the first block
    names: list[bytes]  # of the blocks from there on
    parent: bytes  # of the first block
    reserved: int  # slots that it will ask for
    ends: list[int]  # blocks, of those from `first` on, after which a state is to be had: the most first
    waiting: list[Request] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    snapshot: tuple[int, Block] | None = None  # the state after so many of them
    lease: Lease | None = None  # of what is in the pools before
    end: int = 0  # of the prefix that is filled
    lows: list[int] = field(default_factory=list)  # per group, where its slots begin
    slots: tuple[IntArray, ...] = ()  # of all groups: that of states has one
    # as `Parking` sees whoever is computing a prefix
    state: State = State.RUNNING
    retractions: int = 0
    computed: int = 0


class Loads:
    """All tickets of an engine. Methods are called on the loop's thread."""

    def __init__(
        self,
        ledger: Ledger,
        shelf: Shelf,
        layout: Layout,
        post: Callable[[Callable[[], object]], None],
        ordered: Callable[[Callable[[], object]], object],
    ) -> None:
        """`post` runs something on the loop's thread, `ordered` once all steps launched so far have run."""
        self._ledger, self._shelf, self._layout = ledger, shelf, layout
        self._post, self._ordered = post, ordered
        self._reader, self._filler = Worker("phloem-tier-read"), Worker("phloem-tier-fill")
        self.open: dict[bytes, Ticket] = {}  # by the name of each block on its way
        self._reading: dict[Ticket, float] = {}  # given to the reader, and until when it has time; the oldest first
        self._late: set[Ticket] = set()  # given up, and with the reader still
        self.counts: Counter[str] = Counter(dict.fromkeys(("loads", "loaded_tokens", "failed"), 0))

    @property
    def reserved(self) -> int:
        """Slots that tickets without any will ask for."""
        return sum(ticket.reserved for ticket in {*self.open.values()} if not ticket.slots)

    @property
    def late(self) -> bool:
        """The reader is still at what was given up: nothing more is to be had from the storage for now."""
        return bool(self._late)

    def expire(self) -> None:
        """Give up all that is being read if the oldest of it takes too long. Called once a step."""
        if self._reading and next(iter(self._reading.values())) < time.monotonic():
            log.warning("tiers: the storage takes too long to read: %d loads are given up", len(self._reading))
            self._late |= self._reading.keys()
            for ticket in list(self._reading):
                self._end(ticket, loaded=0)

    def clear(self) -> None:
        """What is on its way must not come any more: it is of a text that was to be forgotten."""
        for ticket in {*self.open.values()}:
            self._end(ticket, loaded=0)

    def start(self, ticket: Ticket) -> None:
        """Begin to load; `ticket.state` says when that has ended."""
        ticket.waiting.append(ticket.request)
        self.open |= dict.fromkeys(ticket.names, ticket)
        names = [*ticket.names, *(state_name(ticket.names[count - 1]) for count in ticket.ends)]
        there = {name: block for name in names if (block := self._shelf.get(name)) is not None}
        last = names[: len(ticket.names) + 1]  # the state that is wanted first is after all of the blocks
        if all(name in there for name in last):
            self._arrived(ticket, *self._read(ticket, there))
            return
        self._reading[ticket] = time.monotonic() + READ_S

        def read() -> None:
            found: tuple[list[Block], tuple[int, Block] | None] = ([], None)
            try:
                found = self._read(ticket, there)
            finally:
                self._post(lambda: self._arrived(ticket, *found))

        self._reader.submit(read)

    def close(self, until: float) -> None:
        """End the threads; what is on its way is not waited for beyond `until`. No step follows."""
        self.clear()
        self._filler.close(until)
        self._reader.close(until)

    def _read(self, ticket: Ticket, there: dict[bytes, Block]) -> tuple[list[Block], tuple[int, Block] | None]:
        """Blocks up to the first that is not to be had, and the last state after one of them.

        On the thread that reads.
        """
        size, blocks = self._layout.size, list[Block]()

        def block(number: int, name: bytes) -> Block | None:
            if name in there or ticket.state is State.FINISHED:  # then it was given up
                return there.get(name)
            at = (ticket.first + number) * size
            parent = ticket.names[number - 1] if number else ticket.parent
            return self._shelf.read(name, parent, ticket.keys[at : at + size])

        for number, name in enumerate(ticket.names):
            if (found := block(number, name)) is None:
                break
            blocks.append(found)
        for count in ticket.ends:
            state = block(count - 1, state_name(ticket.names[count - 1])) if count <= len(blocks) else None
            if state is not None and state.firsts[-1] < size:
                return blocks, (count, state)
        return blocks, None

    # --- the steps of a ticket

    def _arrived(self, ticket: Ticket, blocks: list[Block], snapshot: tuple[int, Block] | None) -> None:
        """The blocks are in memory: lease what comes before them, and fill slots, if there are any."""
        self._late.discard(ticket)
        if ticket.state is State.FINISHED:
            return
        ticket.blocks, ticket.snapshot = blocks, snapshot
        used = ticket.names[: len(blocks)]
        if snapshot is not None:
            used.append(state_name(ticket.names[snapshot[0] - 1]))
            blocks = [*blocks, snapshot[1]]
        for name, block in reversed([*zip(used, blocks, strict=True)]):  # what has no place is the end
            self._shelf.keep(name, block)
        self._shelf.refresh(used)
        if not any(request.state is State.WAITING for request in ticket.waiting) or not self._allocate(ticket):
            self._end(ticket, loaded=0)
            return
        self._ledger.loading.append(ticket.slots)

        def fill() -> None:
            filled = False
            try:
                self._fill(ticket)
                filled = True
            finally:
                self._post(lambda: self._filled(ticket, filled))

        self._ordered(lambda: self._filler.submit(fill))

    def _allocate(self, ticket: Ticket) -> bool:
        """A lease and slots; False, and nothing is held, where the tree has changed too much, or is too full."""
        ledger, size = self._ledger, self._layout.size
        lease = ledger.cache.lease(ledger.cache.match(ticket.keys, ticket.limit, ticket.request.namespace))
        begin = lease.length
        end = self._reach(ticket, begin) if begin >= ticket.first * size else begin
        ticket.lows = [self._low(group, begin, end) for group in range(len(ledger.pools))]
        taken = self._take([end - low for low in ticket.lows]) if end > begin else None
        if taken is None:
            ledger.cache.release(lease)
            return False
        ticket.lease, ticket.end, ticket.slots = lease, end, taken
        return True

    def _take(self, counts: Sequence[int]) -> tuple[IntArray, ...] | None:
        """So many slots of each group, and one for a state where layers keep one; None where any are missing."""
        ledger, states, taken = self._ledger, self._ledger.states, None
        own: IntArray | None = None
        try:
            own = None if states is None else states.take()
            taken = ledger.take(counts) if states is None or own is not None else None
        except Exception:  # an eviction rule: nothing else was taken yet
            log.exception("no slots could be had for a prefix to load")
        if states is None or own is None:
            return taken
        if taken is None:
            states.landed(own, kept=False)
            return None
        return (*taken, own)

    def _low(self, group: int, begin: int, end: int) -> int:
        """Where the rows begin that a prefix of `end` tokens needs of a group, beside those of a leased one."""
        window = self._ledger.windows[group]
        return begin if window is None else max(begin, win.needed_from(end, window, self._ledger.page_size))

    def _reach(self, ticket: Ticket, begin: int) -> int:
        """The longest prefix that the blocks can make of the first `begin` tokens; `begin` if none."""
        size, counts = self._layout.size, range(len(ticket.blocks), 0, -1)
        if self._ledger.states is not None:
            counts = range(0) if ticket.snapshot is None else range(ticket.snapshot[0], ticket.snapshot[0] + 1)
        ends = [min(ticket.limit, (ticket.first + count) * size) for count in counts]
        return next((end for end in ends if end > begin and self._complete(ticket, begin, end)), begin)

    def _complete(self, ticket: Ticket, begin: int, end: int) -> bool:
        """Every row that such a prefix needs is in the blocks."""
        size, windows = self._layout.size, self._ledger.windows
        # Those with windows first: they need few blocks, and are what most often is not whole.
        for group in sorted(range(len(windows)), key=lambda group: windows[group] is None):
            low = self._low(group, begin, end)
            for number in range(low // size, -(-end // size)):
                if ticket.blocks[number - ticket.first].firsts[group] > max(0, low - number * size):
                    return False
        return True

    def _fill(self, ticket: Ticket) -> None:
        """Copy rows to slots. On the thread that fills."""
        size = self._layout.size
        if ticket.snapshot is not None:
            self._layout.fill(ticket.snapshot[1], len(ticket.lows), size - 1, ticket.slots[-1])
        for group, (low, slots) in enumerate(zip(ticket.lows, ticket.slots, strict=False)):
            for number in range(low // size, -(-ticket.end // size)):
                start, stop = max(low, number * size), min(ticket.end, (number + 1) * size)
                block = ticket.blocks[number - ticket.first]
                self._layout.fill(block, group, start - number * size, slots[start - low : stop - low])

    def _filled(self, ticket: Ticket, filled: bool) -> None:
        """Give the slots to the cache, or back."""
        ledger, lease = self._ledger, ticket.lease
        assert lease is not None, "slots without a lease"
        ledger.loading[:] = [slots for slots in ledger.loading if slots is not ticket.slots]
        if not filled or ticket.state is State.FINISHED:
            for pool, slots in zip(ledger.pools, ticket.slots, strict=False):
                pool.release(slots)
            if ledger.states is not None:
                ledger.states.landed(ticket.slots[-1], kept=False)
            ledger.cache.release(lease)
            self._end(ticket, loaded=0)
            return
        begin, lows = lease.length, ticket.lows
        if ledger.states is not None:
            ledger.states.landed(ticket.slots[-1], kept=True)
            lows = [*lows, ticket.end - 1]  # as if it were the last token's
        rows = []
        for low, slots in zip(lows, ticket.slots, strict=True):
            row: IntArray = np.full(ticket.end, -1, dtype=np.int32)
            row[low:] = slots
            rows.append(row)
        published = ledger.cache.publish(ticket.keys, ticket.end, tuple(rows), lease, ticket.request.namespace)
        ledger.cache.release(published.lease)
        self._end(ticket, loaded=ticket.end - begin)

    def _end(self, ticket: Ticket, *, loaded: int) -> None:
        """Whoever waits for it comes back; nothing, if they have already."""
        if ticket.state is State.FINISHED:
            return
        ticket.state = State.FINISHED
        self._reading.pop(ticket, None)
        for name in ticket.names:
            if self.open.get(name) is ticket:
                del self.open[name]
        self.counts["loads" if loaded else "failed"] += 1
        self.counts["loaded_tokens"] += loaded
