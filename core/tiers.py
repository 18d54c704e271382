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
from typing import Any, Literal

from . import windows as win
from .batch import IntArray
from .events import chain, namespace_hash
from .ledger import Ledger
from .request import Namespace, Request
from .tier_blocks import Layout
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
        last, here = self._found(names, first)
        end = min(limit, last * size)
        if end - have < _LEAST_TOKENS:
            return None
        if end - have > room() - (0 if here else self.loads.reserved):
            # One that gives room may come of those on their way; what is in memory waits for no device.
            return next((ticket for ticket in self.loads.open.values() if not here or ticket.slots), None)
        request.loaded = request.retractions
        parent = names[first - 1] if first else self._root(request.namespace)
        ticket = Ticket(request, request.keys[:], limit, first, names[first:last], parent, end - have)
        self.loads.start(ticket)
        return ticket

    def _found(self, names: Sequence[bytes], first: int) -> tuple[int, bool]:
        """Up to which block from `first` on a prefix is to be had, and whether all of that is in memory."""
        last, here = first, True
        while last < len(names):
            if self._shelf.get(names[last]) is None:
                if self.loads.late or not self._shelf.on_disk(names[last]):
                    break
                here = False
            last += 1
        return last, here

    # --- from the pools to the tiers

    def started(self, request: Request) -> None:
        """A request begins to run on what it has found in the cache, which so is in use, and hot."""
        assert request.lease is not None
        found = self._names(request)[: request.lease.length // self._layout.size]
        if found:
            self._shelf.refresh(found)
        if self._write == "through" or (self._write == "hot" and not request.retractions):  # else it is its own text
            self._keep(request, 0, request.lease.length)

    def published(self, request: Request, length: int) -> None:
        """The first `length` tokens of a running request are computed, and about to go to the cache."""
        assert request.lease is not None
        if self._write == "through":
            self._keep(request, request.lease.length, length)

    def _keep(self, request: Request, start: int, length: int) -> None:
        """Copy the whole blocks that end within tokens [start, length) of a request, and that lie in no tier."""
        size, ledger = self._layout.size, self._ledger
        names = self._names(request)[: length // size]
        wanted = self._shelf.lacks(names, start // size)
        if not wanted:
            return
        rows = [table[request.row] for table in ledger.table.slots]
        lows = [self._low(request, group) for group in range(len(rows))]
        for at in wanted:
            slots = []
            for row, low in zip(rows, lows, strict=True):
                own: IntArray = row[at * size : (at + 1) * size].copy()
                own[: max(0, low - at * size)] = -1
                slots.append(own)
            self._put(names, at, request.keys, request.namespace, slots)
        self._shelf.refresh(names)

    def _low(self, request: Request, group: int) -> int:
        """Where the slots begin that a running request may rely on: of its lease those in the window before the end."""
        window = self._ledger.windows[group]
        if window is None or request.lease is None:
            return 0
        return max(request.lows[group], win.needed_from(request.lease.length, window, self._ledger.page_size))

    def leaving(
        self, namespace: Namespace, tokens: array[int], start: int, base: int, slots: Sequence[IntArray]
    ) -> None:
        """The cache is about to lose state of tokens[start:]; `slots` are those of tokens[base:], per group.

        `base` is where the block begins in which `start` lies. See `Spills`.
        """
        size = self._layout.size
        names = self._chain([], tokens, namespace)
        for at in self._shelf.lacks(names, base // size):
            self._put(names, at, tokens, namespace, [own[at * size - base : (at + 1) * size - base] for own in slots])
        self._shelf.refresh(names)

    def _put(self, names: list[bytes], at: int, keys: array[int], space: Namespace, slots: Sequence[IntArray]) -> None:
        size = self._layout.size
        block = self._shelf.copy(names[at], slots)
        if block is not None:
            parent = names[at - 1] if at else self._root(space)
            self._shelf.put(names[at], block, parent, keys[at * size : (at + 1) * size])

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
            self.leaving(namespace, tokens[: lease.length], 0, 0, cache.slots(lease))
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
