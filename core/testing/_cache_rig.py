"""Drives a cache as the scheduler does, beside a naive model of what it must hold and a canary in every slot."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ..batch import IntArray
from ..interfaces import Cache, CountsUses, Narrows, PluginContext
from ..pool import SlotPool
from ..request import Namespace
from ..windows import needed_from
from ._cache_toys import Holder, Kind, Listener, Prefix, toy_model


class CacheRig:
    """A cache over small pools. Every method performs an operation and asserts what the protocol says of it.

    The toy model has a state group for each of `kinds`. `known[g]` is the naive model: the prefixes whose last page was
    published with slots of pool g and is not evicted. `canary[g][slot]` is what was last written to a slot; pages that
    are free have none. `heard` is what a listener was told. `windows` are those of the groups whose slots are tokens';
    `states` is the index of the one behind them, if there is one.
    """

    def __init__(
        self,
        plugin: type[Any],
        make: Callable[[PluginContext], Cache],
        pages: int,
        page_size: int,
        kinds: Sequence[Kind] = (None,),
    ) -> None:
        spec = toy_model(kinds)
        groups = plugin.groups(spec)
        served = {layer for group in groups for layer in group.layers}
        assert served == set(range(len(spec.layers))), "a layer without a pool"
        self.page_size = page_size
        assert {i for group in groups for i in group.states} == set(range(len(spec.states))), "a state without a pool"
        self.windows = [group.window for group in groups if not group.states]
        self.states = len(self.windows) if groups[-1].states else None
        # Fewer where there is a window beside full attention: else those would never be scarce.
        sizes = [pages if w is None or None not in self.windows else -(-pages * 2 // 3) for w in self.windows]
        kept = () if self.states is None else (SlotPool(-(-pages * 2 // 3), 1),)
        self.pools: tuple[SlotPool, ...] = (*(SlotPool(size, page_size) for size in sizes), *kept)
        self.cache = make(PluginContext("cache", plugin.__name__, model=spec, pools=self.pools, page_size=page_size))
        self.shares = "sharing" in plugin.capabilities
        self.uses = cast("CountsUses", self.cache) if "uses" in plugin.capabilities else None
        self.narrows = cast("Narrows", self.cache) if "narrows" in plugin.capabilities else None
        self.heard = Listener(page_size)
        self.cache.listen(self.heard)
        self.holders: list[Holder] = []
        self.known: list[set[Prefix]] = [set() for _ in groups]
        self.canary: list[dict[int, Prefix]] = [{} for _ in groups]
        self._looks: dict[Prefix, tuple[int, int]] = {}  # what was looked up -> version then, answer

    # --- the state, in slots of the first group ---

    @property
    def total(self) -> int:
        """Slots of the pool."""
        return self.pools[0].total

    @property
    def free(self) -> int:
        """Free slots."""
        return self.pools[0].free

    @property
    def evictable(self) -> int:
        """Slots the cache would free if asked."""
        return self.cache.counts()[0].evictable

    @property
    def protected(self) -> int:
        """Slots of leased paths."""
        return self.cache.counts()[0].protected

    @property
    def owned(self) -> int:
        """Slots of the cache."""
        return self.evictable + self.protected

    # --- the life of a request ---

    def serve(self, tokens: array[int], namespace: Namespace = Namespace()) -> None:  # noqa: B008  (immutable)
        """A whole request: match, compute as much as fits, publish, release."""
        holder = self.start(tokens, namespace)
        self.compute(holder, len(tokens))
        self.finish(holder)
        self.audit()

    def start(self, tokens: array[int], namespace: Namespace, limit: int | None = None) -> Holder:
        """Match and lease, as at admission."""
        limit = len(tokens) - 1 if limit is None else limit
        match = self.cache.match(tokens, limit, namespace)
        self._judge(match.length, tokens, limit, namespace)
        lease = self.cache.lease(match)
        assert lease.length == match.length, f"leased {lease.length} of {match.length} matched tokens"
        slots = [s.copy() for s in self.cache.slots(lease)]
        assert [len(s) for s in slots] == [lease.length] * len(self.pools), "a slot for each leased token"
        states = slots.pop() if self.states is not None else np.empty(0, dtype=np.int32)
        holder = Holder(tokens[:], namespace, lease, slots)
        if len(states):
            assert (states[:-1] < 0).all(), "a state in the middle of a lease"
            holder.snapshot = int(states[-1])
            assert holder.snapshot >= 0, "a match without a state"
        self.holders.append(holder)
        return holder

    def compute(self, holder: Holder, end: int) -> int:
        """Write KV of tokens up to `end`, evicting where needed; returns how far it got."""
        if end <= holder.computed or not self._states_for(holder, end):
            return holder.computed
        capacity = len(holder.slots[0])
        pools = self.pools[: len(self.windows)]
        need = -(-end // self.page_size) * self.page_size - capacity
        if need > 0:
            for group, pool in enumerate(pools):
                if pool.free < need:
                    self.evict(need - pool.free, group)
            need = min(need, *(pool.free for pool in pools))
            for group, pool in enumerate(pools):
                self._sweep(group)
                fresh = pool.alloc(need)
                assert fresh is not None
                assert not self.canary[group].keys() & set(fresh.tolist()), "a slot in use was handed out"
                holder.slots[group] = np.concatenate([holder.slots[group], fresh])
        end = min(end, len(holder.slots[0]))
        for group, slots in enumerate(holder.slots):
            for i in range(holder.computed, end):
                self.canary[group][int(slots[i])] = holder.prefix(i + 1)
        self._write_states(holder, end)
        holder.computed = max(holder.computed, end)
        return holder.computed

    def _states_for(self, holder: Holder, end: int) -> bool:
        """Room for the states after `end` tokens and after the last whole page; others it had make way."""
        if self.states is None:
            return True
        pool = self.pools[self.states]
        if pool.free < 2:
            self._drop_states(holder, [n for n in holder.states if n != holder.computed])
        if pool.free < 2:
            self.evict(2 - pool.free, self.states)
        return pool.free >= 2

    def _write_states(self, holder: Holder, end: int) -> None:
        """Own states: where it is now, at its last whole page, and, while there is room, at the first of these."""
        if self.states is None or end <= holder.computed:
            return
        group, page = self.states, self.page_size
        self._drop_states(holder, [n for n in holder.states if n % page])
        first = (holder.computed // page + 1) * page
        wanted = {end, max(end // page * page, first)} - holder.states.keys() | {first}
        self._sweep(group)
        for n in sorted(n for n in wanted if holder.computed < n <= end)[::-1]:
            slot = self.pools[group].alloc(1)
            if slot is not None:
                assert int(slot[0]) not in self.canary[group], "a slot in use was handed out"
                holder.states[n] = int(slot[0])
                self.canary[group][int(slot[0])] = holder.prefix(n)

    def _drop_states(self, holder: Holder, lengths: Sequence[int]) -> None:
        if self.states is not None and lengths:
            self.pools[self.states].release(np.array([holder.states.pop(n) for n in lengths], dtype=np.int32))
            self._sweep(self.states)

    def slide(self, holder: Holder) -> None:
        """Give back what lies behind the windows of a running request."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            low, before = needed_from(holder.computed, window, self.page_size), holder.lows[group]
            leased = holder.lease.length
            if low > before:
                self.pools[group].release(holder.slots[group][max(before, leased) : max(low, leased)].copy())
                holder.slots[group][before:low] = -1
                holder.lows[group] = low
                if before < leased and self.narrows is not None:
                    self.narrows.narrow(holder.lease, low, group)
        leased = holder.lease.length
        if (
            self.states is not None
            and self.narrows is not None
            and holder.computed // self.page_size * self.page_size > leased
        ):
            self.narrows.narrow(holder.lease, leased, self.states)
            holder.snapshot = -1

    def publish(self, holder: Holder, length: int) -> None:
        """Offer computed tokens; afterwards the holder uses the cache's slots where it shares."""
        old, page = holder.lease.length, self.page_size
        if self.states is not None:  # up to its last state at most
            length = max((n for n in holder.states if n <= length and n % page == 0), default=old)
            length = max(length, old)
        offered = self._offered(holder, length)
        had = [{end for end in range(old + page, length + 1, page) if slots[end - 1] >= 0} for slots in offered]
        lease, slots = self.cache.publish(holder.tokens, length, offered, holder.lease, holder.namespace)
        for given in offered:
            given[:] = -1  # the caller's array: it goes on using it
        whole = length // page * page
        least = whole if self.shares else old
        assert least <= lease.length <= whole, f"publish of {length} tokens leased {lease.length}"
        assert lease.length % page == 0, f"a lease of {lease.length} tokens, not of whole pages"
        for kept in slots:
            assert len(kept) == lease.length - old, "a slot for each newly leased token"
        for mine, kept in zip(holder.slots, slots, strict=False):
            mine[old : lease.length] = kept
        if self.states is not None and lease.length > old:
            assert (slots[-1][:-1] < 0).all(), "a state in the middle of what was published"
            holder.states.pop(lease.length)
            holder.snapshot = int(slots[-1][-1])
            assert holder.snapshot >= 0, "the state that was published is not leased"
        holder.lease = lease
        if self.shares:
            for known, ends in zip(self.known, had, strict=True):
                known |= {holder.prefix(end) for end in ends}

    def _offered(self, holder: Holder, length: int) -> tuple[IntArray, ...]:
        offered = tuple(slots[:length].copy() for slots in holder.slots)
        if self.states is None:
            return offered
        states: IntArray = np.full(length, -1, dtype=np.int32)
        if length > holder.lease.length:
            states[-1] = holder.states[length]
        return (*offered, states)

    def finish(self, holder: Holder) -> None:
        """Publish everything computed, then leave."""
        self.publish(holder, holder.computed)
        self.abort(holder)

    def abort(self, holder: Holder) -> None:
        """Leave at once: free what the request owns and release its lease."""
        self.holders.remove(holder)
        for group, pool in enumerate(self.pools[: len(self.windows)]):
            pool.release(holder.own(group))
        self._drop_states(holder, list(holder.states))
        if self.uses is not None:
            self.uses.used(holder.lease, holder.found, len(holder.tokens) % 5 - 2)
        self.cache.release(holder.lease)
        self._forget()  # a leaf without a window is of no use to anybody

    # --- the cache as a whole ---

    def expected(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """What the naive model says of a match: the longest prefix of which every group has what it sees."""
        page = self.page_size

        def sees(end: int) -> bool:
            if self.states is not None and end and (namespace, tokens[:end].tobytes()) not in self.known[self.states]:
                return False
            for window, known in zip(self.windows, self.known, strict=False):
                low = 0 if window is None else max(0, end - window + 1) // page * page
                if any((namespace, tokens[: at + page].tobytes()) not in known for at in range(low, end, page)):
                    return False
            return True

        return next(end for end in range(limit // page * page, -1, -page) if sees(end))

    def _judge(self, length: int, tokens: array[int], limit: int, namespace: Namespace) -> None:
        """A cache that shares finds all that the model knows; another finds what it likes, if it is really there."""
        assert 0 <= length <= limit, f"matched {length} tokens under a limit of {limit}"
        assert length % self.page_size == 0, f"matched {length} tokens, not whole pages"
        if self.shares:
            expected = self.expected(tokens, limit, namespace)
            assert length == expected, f"matched {length} tokens, {expected} are cached"

    def look(self, tokens: array[int], namespace: Namespace, limit: int | None = None) -> int:
        """Peek and match agree with the model and with each other, and peek changes nothing."""
        limit = len(tokens) if limit is None else limit
        before = (self.cache.version, self.cache.counts(), self.free)
        length = self.cache.peek(tokens, limit, namespace)
        assert length == self.cache.peek(tokens, limit, namespace), "peek changed what it looks at"
        assert before == (self.cache.version, self.cache.counts(), self.free), "peek changed the cache"
        self._judge(length, tokens, limit, namespace)
        match = self.cache.match(tokens, limit, namespace)
        assert match.length == length, f"match finds {match.length} tokens, peek {length}"
        assert before == (self.cache.version, self.cache.counts(), self.free), "a match changed what is cached"
        self._looks[namespace, tokens[:limit].tobytes()] = self.cache.version, length
        return length

    def evict(self, slots: int, group: int = 0) -> int:
        """Eviction frees what it says, at least what was asked if it could, and never what is leased."""
        evictable, free = self.cache.counts()[group].evictable, self.pools[group].free
        freed = self.cache.evict(slots, group)
        assert freed == self.pools[group].free - free, f"evict says {freed}, the pool gained otherwise"
        assert min(slots, evictable) <= freed <= evictable, f"evict({slots}) of {evictable} freed {freed}"
        before = len(self.known[group])
        self._forget()
        gone = (before - len(self.known[group])) * self.pools[group].page_size
        assert gone == freed or not self.shares, "freed pages that are still in use, or are lost"
        return freed

    def reset(self) -> None:
        """A reset drops all but the leased prefixes."""
        self.cache.reset()
        self._forget()
        for group, known in enumerate(self.known):
            assert not self.shares or known == self._leased(group), "reset keeps exactly what is leased"
            assert self.cache.counts()[group].evictable == 0, "reset left something evictable"

    def _forget(self) -> None:
        """Take from the model what the cache has given up; leased prefixes must be there."""
        for group, known in enumerate(self.known):
            known &= self._kept(group)
            assert not self.shares or self._leased(group) <= known, "a leased prefix was evicted"

    def _kept(self, group: int) -> set[Prefix]:
        """The prefixes whose KV lies in the cache's pages, by the canaries in them."""
        page, canary = self.pools[group].page_size, self.canary[group]
        pages = self.cache.owned_pages()[group]
        kept = {canary[number * page + page - 1] for number in pages}
        assert len(kept) == len(pages), "the cache keeps two copies of a page"
        return kept

    def _leased(self, group: int) -> set[Prefix]:
        page, found = self.page_size, set()
        for holder in self.holders:
            slots = self.cache.slots(holder.lease)[group]
            found |= {holder.prefix(end) for end in range(page, len(slots) + 1, page) if slots[end - 1] >= 0}
        return found

    # --- everything that must hold at any time ---

    def audit(self) -> None:
        """Conservation, one owner per page, exact counts, right contents, honest `version`."""
        self.cache.check()
        for group, known in enumerate(self.known):
            self._audit_owners(group)
            self._audit_contents(group)
            if self.shares:
                assert known == self._kept(group), "what is cached is not what was published and not evicted"
                counts, page = self.cache.counts()[group], self.pools[group].page_size
                leased = len(self._leased(group)) * page
                assert counts.protected == leased, f"{counts.protected} slots protected, {leased} leased"
                held = len(known) * page
                assert counts.evictable == held - leased, f"{counts} for {held} distinct slots"
        if self.shares:
            self._audit_heard()
        for (namespace, text), (version, length) in self._looks.items():
            if version == self.cache.version:
                tokens = array("i", text)
                now = self.cache.peek(tokens, len(tokens), namespace)
                assert now == length, f"a match went from {length} to {now} tokens under one version"

    def _audit_heard(self) -> None:
        """A listener knows all that is cached; and, as paths to it, nothing else."""
        for known in self.known:
            assert known <= self.heard.view, "something is cached that a listener was not told"
        if None in self.windows:
            full = self.known[self.windows.index(None)]
            assert self.heard.view == full, "what a listener was told is not what is cached"
        paths = {holder.prefix(holder.lease.length) for holder in self.holders}.union(*self.known)
        for space, text in self.heard.view:
            assert any(space == other and longer.startswith(text) for other, longer in paths), (
                "a listener missed an end"
            )

    def _audit_owners(self, group: int) -> None:
        pool, counts = self.pools[group], self.cache.counts()[group]
        free, cached = pool.free_set(), self.cache.owned_pages()[group]
        owners = [*free, *cached]
        page = pool.page_size
        for holder in self.holders:
            owners += holder.states.values() if group == self.states else (holder.own(group)[::page] // page).tolist()
        assert len(owners) == len(set(owners)), "a page has two owners"
        assert len(owners) == pool.total // page, "a page has no owner"
        assert len(cached) * page == sum(counts), f"{counts} for {len(cached)} pages"
        self._sweep(group)

    def _sweep(self, group: int) -> None:
        """Free pages hold nothing any more."""
        size = self.pools[group].page_size
        for page in self.pools[group].free_set():
            for slot in range(page * size, (page + 1) * size):
                self.canary[group].pop(slot, None)

    def _audit_contents(self, group: int) -> None:
        """What the next token of each request sees is where the request looks for it, and locked if it is shared."""
        if group == self.states:
            self._audit_states()
            return
        window = self.windows[group]
        for holder in self.holders:
            leased, mine = self.cache.slots(holder.lease)[group], holder.slots[group]
            there = leased >= 0
            both = there & (mine[: holder.lease.length] >= 0)  # a lease may protect what its holder has done with
            assert np.array_equal(leased[both], mine[: holder.lease.length][both]), "leased slots changed"
            first = 0 if window is None else max(0, holder.computed - window + 1)
            assert there[first:].all(), "a token that is seen is not protected"
            for i, slot in enumerate(mine[first : holder.computed].tolist(), first):
                assert self.canary[group].get(slot) == holder.prefix(i + 1), f"token {i}: slot {slot} holds other KV"

    def _audit_states(self) -> None:
        """Each request has the state it goes on from, and a leased one is the one that was read."""
        assert self.states is not None
        for holder in self.holders:
            if not holder.computed:
                continue
            slot = holder.states.get(holder.computed, holder.snapshot)
            assert self.canary[self.states].get(slot) == holder.prefix(holder.computed), (
                f"slot {slot} holds another state"
            )
            if holder.snapshot >= 0:
                leased = self.cache.slots(holder.lease)[self.states]
                assert int(leased[-1]) == holder.snapshot, "a leased state moved"
