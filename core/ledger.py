"""Who holds which slot: moves ownership between the free list, running requests and the cache, and can prove it.

A request's row of the slot table, tokens left to right:

    0 ................ lease.length ............... computed ............ capacity
    |  the cache's, locked by the lease  |  the request's, written  |  the request's, not yet written  |

All lengths on the left of `capacity` may be ragged; `lease.length` and `capacity` are whole pages.

In a group with a window the request's part begins at `lows[group]`, where that lies behind the lease: slots of tokens
that nobody sees any more are free, or the cache's to evict. The row may name them still; attention does not read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from . import windows as win
from .batch import IntArray
from .holds import Holds
from .interfaces import Cache, CountsUses, Lease, Narrows
from .pool import KVStore, SlotPool, SlotTable
from .request import Request, State
from .state_slots import StateSlots

if TYPE_CHECKING:
    from .tiers import Tiers


class Ledger:
    """All slot bookkeeping of the engine. Used by the scheduler, on the loop's thread."""

    def __init__(
        self,
        cache: Cache,
        pools: Sequence[SlotPool],
        kv: KVStore,
        holds: Holds,
        *,
        rows: int,
        context: int,
        windows: Sequence[int | None] = (),
        chunk: int = 0,
        states: StateSlots | None = None,
    ) -> None:
        """`pools` are those of groups whose slots are tokens', and `windows` theirs; `states` is the group behind them.

        `chunk` is the most tokens that one request computes in a step.
        """
        self.cache, self.holds = cache, holds
        self.pools = tuple(pools)
        self.kv, self.states = kv, states
        self.shares = "sharing" in cache.capabilities  # it promises that a published prefix can be matched
        self._uses: CountsUses | None = cast("CountsUses", cache) if "uses" in cache.capabilities else None
        self._narrows: Narrows | None = cast("Narrows", cache) if "narrows" in cache.capabilities else None
        self.page_size = pools[0].page_size
        self.windows = windows = tuple(windows) or (None,) * len(pools)
        self._windows = [(g, w, win.stride(w, self.page_size)) for g, w in enumerate(windows) if w is not None]
        self._guide = win.guide(windows)
        window = windows[self._guide]
        self._most = None if window is None else win.span(window, self.page_size) + self._pages(chunk)
        self._scarce = [g for g, w in enumerate(windows) if w is None] or [self._guide]
        self.table = SlotTable(len(pools), rows, self._pages(context) + self.page_size)
        self.evicted = 0
        self.tiers: Tiers | None = None
        self.loading: list[tuple[IntArray, ...]] = []  # slots that a tier is filling, by group

    def floor(self, tokens: int) -> int:
        """Tokens of whole pages."""
        return tokens // self.page_size * self.page_size

    def _pages(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    @property
    def available(self) -> int:
        """Slots that can be had without touching a running request, in the scarcest group.

        Not in those with windows, beside one without: they have what running requests need, or are as large.
        """
        counts = self.cache.counts()
        return min(self.pools[g].free + counts[g].evictable for g in self._scarce)

    def want(self, request: Request, later: int) -> int:
        """Slots of that group that a request with a lease will ask for, if `later` more tokens follow its text."""
        more = len(request.tokens) + later - request.capacity
        if self._most is None or request.lease is None:
            return more
        held = request.capacity - max(request.lows[self._guide], request.lease.length)
        return min(more, max(0, self._most - held))

    def peek(self, request: Request) -> int:
        """Refresh `request.matched`, walking the tree only if it changed since the last look."""
        if request.matched_version != self.cache.version:
            request.matched = self.cache.peek(request.keys, request.match_limit, request.namespace)
            request.matched_version = self.cache.version
        return request.matched

    def admit(self, request: Request) -> None:
        """Give a waiting request a row and a lease on its longest cached prefix. Needs a free row."""
        match = self.cache.match(request.keys, request.match_limit, request.namespace)
        lease = self.cache.lease(match)
        request.row = self.table.take()
        request.lease = lease
        request.computed = request.capacity = lease.length
        request.lows = [0] * len(self.pools)
        leased = self.cache.slots(lease)
        for table, slots in zip(self.table.slots, leased, strict=False):
            np.maximum(slots, 0, out=table[request.row, : lease.length])
        if self.states is not None:
            self.states.admit(request, leased[-1], match.shared)

    def mark(self, request: Request, at: int) -> bool:
        """See to it that others can go on after the first `at` tokens of a running request; False if they can't."""
        return self.states is None or self.states.mark(request, at)

    def extend(self, request: Request, tokens: int, states: Iterable[int] = (), *, spare: bool = False) -> bool:
        """Make room for the KV of tokens[:tokens], evicting if needed; False (nothing is lost) if there is none.

        So too for the states after so many tokens, with `spare` only where no other request can miss their slots.
        """
        if self.states is not None and not self.states.extend(request, states, spare=spare):
            return False
        need = self._pages(tokens) - request.capacity
        if need <= 0:
            return True
        taken = self.take([need] * len(self.pools))
        if taken is None:
            return False
        for slots, table in zip(taken, self.table.slots, strict=True):
            table[request.row, request.capacity : request.capacity + need] = slots
        request.capacity += need
        return True

    def take(self, counts: Sequence[int]) -> tuple[IntArray, ...] | None:
        """So many slots of each group, whole pages, evicting if needed; None (none are taken) if there are too few."""
        for group, (pool, count) in enumerate(zip(self.pools, counts, strict=True)):
            if pool.free < count:
                self.evicted += self.cache.evict(count - pool.free, group)
            if pool.free < count:
                return None
        taken = [pool.alloc(count) for pool, count in zip(self.pools, counts, strict=True)]
        return tuple(slots for slots in taken if slots is not None)

    def trim(self, request: Request, tokens: int) -> None:
        """Return the pages beyond those that tokens[:tokens] need."""
        assert request.lease is not None
        keep = max(self._pages(tokens), request.lease.length)
        if keep < request.capacity:
            for pool, table, low in zip(self.pools, self.table.slots, request.lows, strict=True):
                pool.release(table[request.row, max(keep, low) : request.capacity].copy())
            request.capacity = keep

    def slide(self, request: Request) -> None:
        """Give back what a running request has done with, such as what lies behind windows: after each of its steps."""
        assert request.lease is not None
        if self.states is not None:
            self.states.settle(request)
        leased = request.lease.length
        for group, window, stride in self._windows:
            low, before = win.needed_from(request.computed, window, self.page_size), request.lows[group]
            if low - before < stride:
                continue
            request.lows[group] = low
            mine = max(before, leased)
            if mine < low:
                self.pools[group].release(self.table.slots[group][request.row, mine:low].copy())
            if before < leased and self._narrows is not None:
                self._narrows.narrow(request.lease, low, group)

    def adopt(self, request: Request, base: int, nodes: Sequence[int]) -> None:
        """Keep the KV of accepted draft nodes, return that of the others.

        Node i's KV lies at row index base + i; the accepted path moves to base, base + 1, ... At page size 1 that is
        a permutation of slot numbers and no KV moves. With larger pages only nodes off the first path are copied.
        """
        moved = [(node, depth) for depth, node in enumerate(nodes) if node != depth]
        if moved:
            sources = base + np.array([node for node, _ in moved])
            targets = base + np.array([depth for _, depth in moved])
            for group, table in enumerate(self.table.slots):
                row = table[request.row]
                if self.page_size == 1:
                    rest = np.setdiff1d(np.arange(base, request.capacity), base + np.asarray(nodes))
                    row[base : request.capacity] = row[np.concatenate([base + np.asarray(nodes), rest])]
                else:
                    self.kv.move(row[sources], row[targets], group)
        self.trim(request, base + len(nodes))

    def publish(self, request: Request, length: int, *, ends: bool = False) -> None:
        """Offer the first `length` computed tokens for sharing; the row then names the cache's slots.

        Where layers keep states so much of it as ends where there is one, if need be in parts; `ends`: it leaves.
        """
        assert request.lease is not None
        if self.states is not None:
            for at in self.states.due(request, length, ends=ends):
                if self.tiers is not None:
                    self.tiers.published(request, at)
                self._publish(request, at, request.lease)
        elif length - request.lease.length >= self.page_size:
            if self.tiers is not None:
                self.tiers.published(request, length)
            self._publish(request, length, request.lease)
        if length == request.prompt_len:
            self._expect_again(request)

    def _publish(self, request: Request, length: int, lease: Lease) -> None:
        slots = tuple(table[request.row, :length] for table in self.table.slots)
        if self.states is not None:
            offered = self.states.offer(request, length)
            if offered is None:
                return
            slots = (*slots, offered)
        gone = [slots[group][lease.length : request.lows[group]] for group, _, _ in self._windows]
        for behind in gone:
            behind[:] = -1
        published = self.cache.publish(request.keys, length, slots, lease, request.namespace)
        for behind in gone:
            behind[:] = 0  # the row belongs to somebody else next, and no number in it may be out of bounds
        for table, kept in zip(self.table.slots, published.slots, strict=False):
            np.maximum(kept, 0, out=table[request.row, lease.length : published.lease.length])
        if self.states is not None:
            self.states.published(request, published.slots[-1])
        request.lease = published.lease

    def _expect_again(self, request: Request) -> None:
        """The prompt may be sent again, and is then found to its last token at most: what that needs is used."""
        if (self._windows or self.states is not None) and self.shares:
            if self.tiers is not None and (end := self.tiers.again(request)):
                self.cache.match(request.keys, end, request.namespace)
            self.cache.match(request.keys, request.prompt_len - 1, request.namespace)

    def release(self, request: Request, *, publish: bool, hold: str | None = None) -> None:
        """Take everything from a request. `publish` keeps its computed tokens in the cache, `hold` locks them there."""
        if request.lease is None:
            return
        if publish:
            self.publish(request, min(request.computed, len(request.tokens)), ends=True)
        self.trim(request, request.lease.length)
        if request.state is State.FINISHED and request.computed >= request.prompt_len:
            self._expect_again(request)
        if self._uses is not None:
            found = request.cached_tokens if request.state is State.FINISHED else None
            self._uses.used(request.lease, found or 0, request.call.priority)
        if hold is not None and self.shares:
            self.holds.keep(hold, request.lease, request.call.hold_idle_s)
        else:
            self.cache.release(request.lease)
        if self.states is not None:
            self.states.release(request)
        self.table.give(request.row)
        request.lease = None
        request.row = -1
        request.computed = request.capacity = 0

    def usage(self, running: Iterable[Request]) -> list[dict[str, int]]:
        """Per group: total, free, evictable, protected and leased (owned by running requests) slots."""
        held = [(request, request.lease.length) for request in running if request.lease is not None]
        owned = [sum(r.capacity - max(r.lows[g], leased) for r, leased in held) for g in range(len(self.pools))]
        owned = [mine + sum(len(slots[g]) for slots in self.loading) for g, mine in enumerate(owned)]
        tokens = [
            {
                "total": pool.total,
                "free": pool.free,
                "evictable": count.evictable,
                "protected": count.protected,
                "leased": mine,
            }
            for pool, count, mine in zip(self.pools, self.cache.counts(), owned, strict=False)
        ]
        return tokens if self.states is None else [*tokens, self.states.usage(request for request, _ in held)]

    def check(self, running: Sequence[Request]) -> None:
        """Prove conservation: every page of every group has exactly one owner. Raises AssertionError."""
        self.cache.check()
        self.holds.check()
        cached = self.cache.owned_pages()
        pools = self.pools if self.states is None else (*self.pools, self.states.pool)
        for group, (pool, usage) in enumerate(zip(pools, self.usage(running), strict=True)):
            parts = usage["free"] + usage["evictable"] + usage["protected"] + usage["leased"]
            assert parts == usage["total"], f"group {group}: {usage} does not add up"
            owners: list[int] = [*pool.free_set(), *cached[group]]
            for request in running if group < len(self.pools) else ():
                assert request.lease is not None
                low = max(request.lows[group], request.lease.length)
                mine = self.table.slots[group][request.row, low : request.capacity]
                owners += (mine[:: self.page_size] // self.page_size).tolist()
            if group == len(self.pools) and self.states is not None:
                owners += self.states.owners(running)
            for slots in self.loading if group < len(self.pools) else ():
                owners += (slots[group][:: self.page_size] // self.page_size).tolist()
            assert len(owners) == len(set(owners)) == pool.total // pool.page_size, f"group {group}: a page is shared"
