"""Component `recurrent`: layers that keep one state of a text. A snapshot is the state after a node's last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np

from phloem.batch import IntArray
from phloem.components import Component, Run, TreeNode


class Snapshot(Run):
    """A run of one slot, whatever the tokens of its node."""

    __slots__ = ()

    @property
    def tokens(self) -> int:
        """One slot."""
        return 1


class Recurrent(Component):
    """Keeps states after prefixes, each at the end of a node.

    State of a node: a `Snapshot`, or None where none was kept. A match ends at a snapshot and nowhere else, and a lease
    protects the one at its end, which its holder reads and never writes. Any other may be evicted, whatever lies below:
    the node stays, with its slots in other groups. A leaf without a snapshot is of no use to anybody, so nodes end
    where snapshots are.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"recurrent"})
    requires: ClassVar[tuple[str, ...]] = ()  # the default goes with every cache
    divisible: ClassVar[bool] = False
    run: ClassVar[type[Run]] = Snapshot

    def _at(self, node: TreeNode) -> Run | None:
        """Roots have none: the state of the empty text is zeros."""
        return cast("Run | None", node.states[self.index] if node.parent is not None else None)

    def reach(self, bottom: TreeNode, end: int) -> int:
        """The last snapshot on the path."""
        at = bottom
        if at.end > end and at.parent is not None:
            at = at.parent
        while at.parent is not None and at.states[self.index] is None:
            at = at.parent
        return at.end

    def lock(self, node: TreeNode) -> int:
        """The snapshot, if there is one: as if it were the last token's."""
        run = self._at(node)
        if run is None:
            return node.end
        self.hold(run)
        return node.end - 1

    def unlock(self, node: TreeNode, low: int, now: int | None) -> None:
        """Where a request ends its snapshot was in use until now."""
        run = self._at(node)
        if run is not None and low < node.end:
            self.let_go(run, now)

    def narrow(self, node: TreeNode, low: int, start: int) -> int:
        """Who reads nothing before the end needs no snapshot."""
        if start < node.end:
            return low
        self.unlock(node, low, None)
        return node.end

    def gather(self, node: TreeNode, low: int, start: int) -> IntArray:
        """See `Component.gather`: all -1, but for the snapshot in the last place."""
        slots: IntArray = np.full(node.end - start, -1, dtype=np.int32)
        run = self._at(node)
        if run is not None and run.slots is not None and low < node.end and len(slots):
            slots[-1] = run.slots[0]
        return slots

    def touch(self, node: TreeNode, now: int) -> None:
        """It is used."""
        run = self._at(node)
        if run is not None:
            self.use(run, now)

    def fill(self, node: TreeNode, slots: IntArray) -> None:
        """Only the last of the publisher's slots may be one. It is kept because a use of it is expected."""
        if slots[-1] >= 0:
            self.use(self.add(node, slots[-1:]), self.tree.clock)

    def merge(self, nodes: Sequence[TreeNode], slots: IntArray) -> bool:
        """A snapshot where there was none, or a copy that is not needed."""
        missing = nodes[-1].states[self.index] is None
        if missing:
            self.fill(nodes[-1], slots)
        elif slots[-1] >= 0:
            self.free(slots[-1:].copy())
        return missing

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The snapshot stays at its end."""

    def check(self, ends: Sequence[tuple[TreeNode, int]]) -> None:
        """What leases need: one snapshot each, where they have not done with it."""
        self.check_runs(Counter(id(node) for node, low in ends if low < node.end))
