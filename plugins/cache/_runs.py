"""Runs: what a component keeps at a node that may go while the node stays, with locks and an order of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from phloem.batch import IntArray
from phloem.interfaces import CacheCounts, Eviction
from phloem.pool import SlotPool

from ._component import Component, whole
from ._heap import Heap
from ._tree import Node, Tree


class Run:
    """The slots of one group at one node. Eviction rules see it as EvictionNode, with a recency of its own: a use is a
    match or the end of a request that needs it. What has never been used so, such as the window in the middle of a long
    prompt, has `last_access` 0: else it would push out the ends of older conversations.

    `locks` counts the leases that need it. They need all of it or nothing: nodes are split where a lease's window
    begins. `slots` is None once it has left the tree.
    """

    __slots__ = ("entry", "last_access", "level", "locks", "node", "slots")

    def __init__(self, node: Node, slots: IntArray) -> None:
        self.node = node
        self.slots: IntArray | None = slots
        self.locks = 0
        self.last_access, self.level = 0, 0.0
        self.entry: Any = None

    @property
    def is_candidate(self) -> bool:
        """True if it may be evicted."""
        return self.slots is not None and not self.locks

    @property
    def tokens(self) -> int:
        """The node's."""
        return len(self.node.key)

    @property
    def end(self) -> int:
        """The node's."""
        return self.node.end

    @property
    def created(self) -> int:
        """The node's."""
        return self.node.created

    @property
    def hits(self) -> int:
        """The node's."""
        return self.node.hits

    @property
    def priority(self) -> int:
        """The node's."""
        return self.node.priority


class Runs(Component):
    """State of a node: a `Run`, or None where its slots are gone (a tombstone). Counts, locks and evicts runs."""

    run: type[Run] = Run

    def __init__(self, tree: Tree, index: int, pool: SlotPool, rule: Eviction) -> None:
        super().__init__(tree, index, pool)
        self.heap: Heap[Run] = Heap(rule, tree)
        self._evictable = self._protected = 0

    def add(self, node: Node, slots: IntArray) -> Run:
        """A run where there was none, not yet used."""
        run = node.states[self.index] = self.run(node, whole(slots))
        self._evictable += run.tokens
        self.heap.offer(run)
        return run

    def hold(self, run: Run) -> None:
        """One more lease needs it."""
        if not run.locks:
            self._evictable -= run.tokens
            self._protected += run.tokens
        run.locks += 1

    def let_go(self, run: Run, now: int | None) -> None:
        """One lease fewer needs it; with `now` it was in use until now."""
        run.locks -= 1
        if not run.locks:
            self._evictable += run.tokens
            self._protected -= run.tokens
            if now is not None:
                run.last_access, run.level = now, self.tree.level
            self.heap.offer(run)

    def use(self, run: Run, now: int) -> None:
        """A match needs it."""
        run.last_access, run.level = now, self.tree.level
        if not run.locks:
            self.heap.offer(run)

    def drop(self, node: Node) -> None:
        """Its slots, if there are any, are free."""
        if node.states[self.index] is not None:
            self.bury(node)

    def ready(self, node: Node) -> None:
        """Its run has been a candidate since no lease needed it."""

    def pop(self) -> Node | None:
        """A node whose run no lease needs."""
        run = self.heap.pop()
        return None if run is None else run.node

    def bury(self, node: Node) -> None:
        """Leave a tombstone."""
        run: Run = node.states[self.index]
        assert run.slots is not None, "a run that has left the tree already"
        assert not run.locks, "a run that is needed cannot go"
        self._evictable -= run.tokens
        self.free(run.slots)
        run.slots = node.states[self.index] = None

    def clear(self) -> None:
        """Bury what is not needed."""
        self.heap.clear()
        for node in self.tree.nodes():
            run: Run | None = node.states[self.index]
            if run is not None and not run.locks:
                self.bury(node)

    def counts(self) -> CacheCounts:
        """Slots of runs."""
        return CacheCounts(self._evictable, self._protected)

    def slots(self, node: Node) -> IntArray | None:
        """Those of the run."""
        run: Run | None = node.states[self.index]
        return None if run is None else run.slots

    def check_runs(self, needed: Counter[int]) -> None:
        """Locks against leases (`needed`, by the node's id), counts against runs, the heap against both."""
        live: list[Run] = [run for node in self.tree.nodes() if (run := node.states[self.index]) is not None]
        for run in live:
            assert run.slots is not None, "a run in the tree without slots"
            assert run.node.states[self.index] is run, "a run at another node than its own"
            locks = needed.pop(id(run.node), 0)
            assert run.locks == locks, f"{run.locks} locks at a run that {locks} leases need"
        assert not needed, "a lease needs a run that is gone"
        evictable = sum(run.tokens for run in live if not run.locks)
        actual = CacheCounts(evictable, sum(run.tokens for run in live) - evictable)
        assert self.counts() == actual, f"counted {self.counts()}, there are {actual}"
        self.heap.check(sum(run.is_candidate for run in live))
