"""Tiers below the prefix cache: what is computed is also kept in host memory and in a storage, and brought back.

The scheduler asks for a waiting request whether they have more of its prefix than the cache; the ledger tells what is
published; a cache that writes back tells what it is about to lose. All of it in blocks (`phloem.tier_blocks`), which
lie on a shelf (`phloem.tier_shelf`) and come back by tickets (`phloem.tier_loads`).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from . import windows as win
from .batch import IntArray
from .events import chain, namespace_hash
from .ledger import Ledger
from .request import Namespace, Request
from .storage import Spills
from .tier_blocks import Block, Layout, state_name
from .tier_loads import Loads, Ticket
from .tier_shelf import Shelf

log = logging.getLogger(__name__)
Write = Literal["through", "hot", "back"]
# A request does not wait for fewer tokens than this.
_LEAST_TOKENS = 16
# What an orderly end gives to the device, all in all.
PATIENCE_S = 10.0


class Tiers:
    """The tiers of an engine. All methods are called on the loop's thread."""

    def __init__(self, ledger: Ledger, shelf: Shelf, loads: Loads, layout: Layout, write: Write) -> None:
        self.loads = loads
        self._ledger, self._shelf, self._layout, self._write = ledger, shelf, layout, write
        self._cache = cast("Spills", ledger.cache)
        if write == "back":
            self._cache.spill(self.leaving, layout.size)
        if ledger.states is not None:
            ledger.states.block = layout.size

    # --- from the tiers to the pools

    def fetch(self, request: Request, room: Callable[[], int]) -> Ticket | None:
        """A ticket to wait for, if the tiers have more of a waiting request's prefix than the cache; else None.

        `room()` is how many slots are there for it. Called for a request that might start in this step; it gets one
        ticket of its own each time it is queued, so whatever fails costs it no more than that time.
        """
        ledger, size = self._ledger, self._layout.size
        limit, have = ledger.floor(request.match_limit), ledger.peek(request)
        if request.loaded == request.retractions or limit - have < _LEAST_TOKENS:
            return None
        names, first = self._names(request), have // size
        if first < len(names) and (other := self.loads.open.get(names[first])) is not None:
            other.waiting.append(request)
            return other
        last, states, here = self._found(names, first, limit)
        end = min(limit, last * size)
        if end - have < _LEAST_TOKENS:
            return None
        if end - have > room() - (0 if here else self.loads.reserved):
            # One that gives room may come of those on their way; what is in memory waits for no device.
            return next((ticket for ticket in self.loads.open.values() if not here or ticket.slots), None)
        request.loaded = request.retractions
        parent = names[first - 1] if first else self._root(request.namespace)
        ticket = Ticket(request, request.keys[:], limit, first, names[first:last], parent, end - have, states)
        self.loads.start(ticket)
        return ticket

    def _found(self, names: Sequence[bytes], first: int, limit: int) -> tuple[int, list[int], bool]:
        """Up to which block from `first` on a prefix is to be had; whether all of that is in memory comes last.

        Between them, where layers keep states: after how many of these blocks there is one, the most first. Then there
        is one after the last block, which lies within `limit` tokens.
        """
        last, states = first, list[int]()
        while last < len(names) and self._has(names[last]):
            last += 1
        if self._ledger.states is not None:
            counts = range(min(last, limit // self._layout.size) - first, 0, -1)
            states = [count for count in counts if self._has(state_name(names[first + count - 1]))]
            last = first + states[0] if states else first
        wanted = [*names[first:last], *(state_name(names[last - 1]) for _ in states[:1])]
        return last, states, all(self._shelf.get(name) is not None for name in wanted)

    def _has(self, name: bytes) -> bool:
        """It is to be had; from a device that does not answer nothing is."""
        return self._shelf.get(name) is not None or (not self.loads.late and self._shelf.on_disk(name))

    # --- from the pools to the tiers

    def started(self, request: Request) -> None:
        """A request begins to run on what it has found in the cache, which so is in use, and hot."""
        lease = request.lease
        assert lease is not None
        names, size = self._names(request), self._layout.size
        self._refresh(names[: lease.length // size])
        if self._write == "through" or (self._write == "hot" and not request.retractions):  # else it is its own text
            self._keep(names, request.keys[: lease.length], request.namespace, 0, self._cache.kept(lease))
        if self._ledger.states is not None:  # where its text parts from known ones others may go on
            known = next((number for number, name in enumerate(names) if not self._has(name)), len(names))
            self._ledger.mark(request, min(known, (len(request.keys) - 1) // size) * size)

    def again(self, request: Request) -> int:
        """Up to where the pool has to keep a prompt until somebody asks for it again; 0 where nobody waits for that."""
        return (request.prompt_len - 1) // self._layout.size * self._layout.size if self._write == "hot" else 0

    def published(self, request: Request, length: int) -> None:
        """The first `length` tokens of a running request are computed, and about to go to the cache.

        Where layers keep states there is one after them.
        """
        assert request.lease is not None
        ledger, size = self._ledger, self._layout.size
        base = request.lease.length // size * size
        if self._write != "through" or length < base + size:
            return
        slots: list[IntArray] = []
        for group, table in enumerate(ledger.table.slots):
            own: IntArray = table[request.row, base:length].copy()
            own[: max(0, self._low(request, group) - base)] = -1
            slots.append(own)
        if ledger.states is not None:
            own = np.full(length - base, -1, dtype=np.int32)
            own[-1] = request.states[length]
            slots.append(own)
        self._keep(self._names(request), request.keys[:length], request.namespace, base, slots)

    def _low(self, request: Request, group: int) -> int:
        """Where the slots begin that a running request may rely on: of its lease those in the window before the end."""
        window = self._ledger.windows[group]
        if window is None or request.lease is None:
            return 0
        return max(request.lows[group], win.needed_from(request.lease.length, window, self._ledger.page_size))

    def leaving(self, namespace: Namespace, tokens: array[int], base: int, slots: Sequence[IntArray]) -> None:
        """The cache is about to lose some of what `slots`, per group those of tokens[base:], hold. See `Leaving`."""
        self._keep(self._chain([], tokens, namespace), tokens, namespace, base, slots)

    def _keep(
        self, names: Sequence[bytes], tokens: array[int], space: Namespace, base: int, slots: Sequence[IntArray]
    ) -> None:
        """Copy the whole blocks of tokens[base:] that lie in no tier, and states after them; see `leaving` for `slots`.

        So too blocks that lie there without all of their windows. `base` is where a block begins.
        """
        layout, size, groups = self._layout, self._layout.size, len(self._ledger.pools)
        names = names[: len(tokens) // size]
        if lost := self._ledger.kv.lost:  # a later life would take what is there instead for rows of these
            self._shelf.freeze(lost)

        def rows(at: int) -> list[IntArray]:
            return [own[at * size - base : (at + 1) * size - base] for own in slots[:groups]]

        for at in self._shelf.lacks(names, base // size, lambda at: layout.complete(rows(at))):
            self._put(names, at, names[at], tokens, space, partial(layout.copy, rows(at)))
        for own in slots[groups:]:
            there = np.flatnonzero(own[size - 1 :: size] >= 0) + base // size
            for at in there.tolist():
                name, slot = state_name(names[at]), int(own[(at + 1) * size - 1 - base])
                if self._shelf.lacks_state(name, at + 1):
                    self._put(names, at, name, tokens, space, partial(layout.copy_state, slot))
        self._refresh(names)

    def _put(
        self,
        names: Sequence[bytes],
        at: int,
        name: bytes,
        tokens: array[int],
        space: Namespace,
        made: Callable[[], Block],
    ) -> None:
        """Keep the block of that number, or the state after it, under a name."""
        block, size = self._shelf.copy(name, made), self._layout.size
        if block is not None:
            parent = names[at - 1] if at else self._root(space)
            self._shelf.put(name, block, parent, tokens[at * size : (at + 1) * size])

    def _refresh(self, names: Sequence[bytes]) -> None:
        """A prefix is in use, and the state at its end."""
        if names:
            self._shelf.refresh([*names, state_name(names[-1])] if self._ledger.states is not None else names)

    # --- names

    def _names(self, request: Request) -> list[bytes]:
        """The names of the whole blocks of a request's text; kept with it, since texts only grow."""
        return self._chain(request.blocks, request.keys, request.namespace)

    def _chain(self, names: list[bytes], keys: array[int], space: Namespace) -> list[bytes]:
        """Extend the names of a text's first blocks to all of its whole ones."""
        size = self._layout.size
        if len(names) < len(keys) // size:
            parent = names[-1] if names else self._root(space)
            names += [name for name, _ in chain(keys[len(names) * size :], size, parent)]
        return names

    def _root(self, space: Namespace) -> bytes:
        return namespace_hash(space, self._layout.size)

    # --- life

    @property
    def loading(self) -> bool:
        """Something is on its way to the pools."""
        return bool(self.loads.open)

    def clear(self) -> None:
        """Forget what is in memory, or on its way there; the storage keeps what it has."""
        self.loads.clear()
        self._shelf.clear()

    def close(self, *, clean: bool) -> None:
        """End the threads. If the engine ends in order, a cache that writes back is stored first.

        All of it takes `PATIENCE_S` at most, whatever hangs.
        """
        end = time.monotonic() + PATIENCE_S
        if clean and self._write == "back" and self._shelf.durable:
            self._save(end)
        self._shelf.close(end, self.loads.close)

    def _save(self, end: float) -> None:
        """Store what only the pools have."""
        collector = _Collector()
        self._shelf.patient_until = end
        cache = self._ledger.cache
        cache.listen(collector)
        for namespace, tokens in collector.found:
            if time.monotonic() > end:
                log.warning("tiers: not all that was cached could be stored before the end")
                return
            lease = cache.lease(cache.match(tokens, len(tokens), namespace))
            self.leaving(namespace, tokens[: lease.length], 0, self._cache.kept(lease))
            cache.release(lease)

    def stats(self) -> dict[str, Any]:
        """Numbers for `Engine.stats`: loads, and per tier what lies there."""
        return {**self.loads.counts, "loading": len({*self.loads.open.values()}), **self._shelf.stats()}


class _Collector:
    """A `CacheListener` that hears what is there."""

    def __init__(self) -> None:
        self.found: list[tuple[Namespace, array[int]]] = []

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """A prefix."""
        self.found.append((namespace, tokens))

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Nothing is asked for after the end."""

    def cleared(self) -> None:
        """Nothing is asked for after the end."""
