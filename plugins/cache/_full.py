"""Component `full`: every token of a path has a slot, and a lease protects the whole path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phloem.batch import IntArray
from phloem.interfaces import CacheCounts, Eviction
from phloem.pool import SlotPool

from ._component import Component, whole
from ._heap import Heap
from ._tree import Node, Tree


class Full(Component):
    """State of a node: its slots, one per token, whole pages, never written in place.

    Locks and counts are the tree's own. Leaves are evicted, and what they leave bare.
    """

    def __init__(self, tree: Tree, index: int, pool: SlotPool, rule: Eviction) -> None:
        super().__init__(tree, index, pool)
        self.heap: Heap[Node] = Heap(rule, tree)

    def reach(self, bottom: Node, end: int) -> int:
        """All of it: a node in the tree has its slots."""
        return end

    def lock(self, node: Node) -> int:
        """The tree's lock protects the path."""
        return 0

    def unlock(self, node: Node, low: int, now: int | None) -> None:
        """The tree's."""

    def gather(self, node: Node, low: int, start: int) -> IntArray:
        """See `Component.gather`."""
        parts: list[IntArray] = []
        at: Node | None = node
        while at is not None and at.end > start:
            parts.append(at.states[self.index])
            at = at.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)

    def touch(self, node: Node, now: int) -> None:
        """Its key may have shrunk."""
        if node.is_candidate:
            self.heap.offer(node)

    def fill(self, node: Node, slots: IntArray) -> None:
        """Keep a copy."""
        node.states[self.index] = whole(slots)

    def merge(self, nodes: Sequence[Node], slots: IntArray) -> bool:
        """The publisher's copies are not needed."""
        self.pool.release(slots)
        return False

    def split(self, upper: Node, lower: Node) -> None:
        """Copies: a view would keep the whole array alive after either half is gone."""
        at, slots = upper.tokens, lower.states[self.index]
        upper.states[self.index] = slots[:at].copy()
        lower.states[self.index] = slots[at:].copy()
        if lower.is_candidate:
            self.heap.offer(lower)  # its size may matter to the rule

    def drop(self, node: Node) -> None:
        """Its slots are free."""
        self.free(node.states[self.index])

    def ready(self, node: Node) -> None:
        """A candidate."""
        self.heap.offer(node)

    def pop(self) -> Node | None:
        """A leaf."""
        return self.heap.pop()

    def bury(self, node: Node) -> None:
        """Never: inner nodes are no candidates here."""
        raise AssertionError("a node without its full slots")

    def clear(self) -> None:
        """Forget the order."""
        self.heap.clear()

    def counts(self) -> CacheCounts:
        """Those of the tree."""
        return CacheCounts(self.tree.evictable, self.tree.protected)

    def slots(self, node: Node) -> IntArray | None:
        """All of them."""
        slots: IntArray = node.states[self.index]
        return slots

    def check(self, ends: Sequence[tuple[Node, int]]) -> None:
        """The heap against the leaves; the rest is checked with the tree."""
        self.heap.check(sum(node.is_candidate for node in self.tree.nodes()))
