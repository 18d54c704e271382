"""Component `full`: every token of a path has a slot, and a lease protects the whole path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np

from phloem.batch import IntArray
from phloem.components import CacheCounts, Component, TreeNode


class Full(Component):
    """Keeps every token of a text.

    State of a node: its slots, one per token, whole pages, never written in place. Locks and counts are the tree's own.
    Leaves are evicted, and what they leave bare: the order is one of nodes.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"full"})
    requires: ClassVar[tuple[str, ...]] = ()  # the default goes with every cache
    bounds: ClassVar[bool] = False

    def gather(self, node: TreeNode, low: int, start: int) -> IntArray:
        """See `Component.gather`."""
        parts: list[IntArray] = []
        at: TreeNode | None = node
        while at is not None and at.end > start:
            parts.append(at.states[self.index])
            at = at.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)

    def touch(self, node: TreeNode, now: int) -> None:
        """Its key may have shrunk."""
        if node.is_candidate:
            self.order.offer(node)

    def fill(self, node: TreeNode, slots: IntArray) -> None:
        """Keep a copy."""
        node.states[self.index] = slots.copy()

    def merge(self, nodes: Sequence[TreeNode], slots: IntArray) -> bool:
        """The publisher's copies are not needed."""
        self.pool.release(slots)
        return False

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Copies: a view would keep the whole array alive after either half is gone."""
        at, slots = upper.tokens, lower.states[self.index]
        upper.states[self.index] = slots[:at].copy()
        lower.states[self.index] = slots[at:].copy()
        if lower.is_candidate:
            self.order.offer(lower)  # its size may matter to the rule

    def drop(self, node: TreeNode) -> None:
        """Its slots are free."""
        self.free(node.states[self.index])

    def ready(self, node: TreeNode) -> None:
        """A candidate."""
        self.order.offer(node)

    def pop(self) -> TreeNode | None:
        """A leaf."""
        return cast("TreeNode | None", self.order.pop())

    def bury(self, node: TreeNode) -> None:
        """Never: inner nodes are no candidates here."""
        raise AssertionError("a node without its full slots")

    def clear(self) -> None:
        """Forget the order."""
        self.order.clear()

    def counts(self) -> CacheCounts:
        """Those of the tree."""
        return CacheCounts(self.tree.evictable, self.tree.protected)

    def slots(self, node: TreeNode) -> IntArray | None:
        """All of them."""
        return cast("IntArray", node.states[self.index])

    def check(self, ends: Sequence[tuple[TreeNode, int]]) -> None:
        """The heap against the leaves; the rest is checked with the tree."""
        self.order.check(sum(node.is_candidate for node in self.tree.nodes()))
