"""Component `window`: layers that see the last w tokens only. What lies further back than that is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from phloem.batch import IntArray
from phloem.interfaces import Eviction
from phloem.pool import SlotPool

from ._runs import Run, Runs
from ._tree import Node, Tree

# Of an inner node so many tokens are evicted at once, where it has them: each cut leaves one node more on the path.
CUT_TOKENS = 64


class Window(Runs):
    """State of a node: a `Run`, or None where its slots are gone.

    A match may end where the `window - 1` tokens before it have slots, and a lease protects those, to the page. Any
    run that no lease needs may be evicted, whatever lies below it: the node stays as a tombstone, until somebody who
    has computed it again publishes it.
    """

    def __init__(self, tree: Tree, index: int, pool: SlotPool, rule: Eviction, window: int) -> None:
        super().__init__(tree, index, pool, rule)
        self.need = window - 1  # tokens before a match's end that the next token sees

    def reach(self, bottom: Node, end: int) -> int:
        """Goes up the path until so much of a row has slots."""
        at, need, index = bottom, self.need, self.index
        while need and at.parent is not None:
            start = at.end - len(at.key)
            if at.states[index] is None:
                end = start
            elif end - start >= need:
                break
            at = at.parent
        return end

    def ends(self, node: Node) -> bool:
        """Not at a tombstone."""
        return not self.need or node.states[self.index] is not None

    def lock(self, node: Node) -> int:
        """The last runs of the path, as far as they are there without a gap."""
        page = self.tree.page_size
        low = max(0, node.end - self.need) // page * page
        at = node
        while at.end > low and at.states[self.index] is not None:
            if at.start < low:
                self.tree.split(at, low - at.start)
            run: Run = at.states[self.index]
            self.hold(run)
            at = _up(at)
        return at.end

    def unlock(self, node: Node, low: int, now: int | None) -> None:
        """What becomes evictable where a request ends was in use until now."""
        at = node
        while at.end > low:
            run: Run = at.states[self.index]
            self.let_go(run, now)
            at = _up(at)

    def narrow(self, node: Node, low: int, start: int) -> int:
        """Unlock what lies before `start`, page-floored, of a lock that began at `low`; returns where it begins now."""
        start = min(start // self.tree.page_size * self.tree.page_size, node.end)
        if start <= low:
            return low
        at = node
        while at.end > start:
            if at.start < start:
                self.tree.split(at, start - at.start)
            at = _up(at)
        self.unlock(at, low, None)
        return start

    def gather(self, node: Node, low: int, start: int) -> IntArray:
        """See `Component.gather`."""
        slots: IntArray = np.full(node.end - start, -1, dtype=np.int32)
        at = node
        while at.end > max(low, start):
            slots[at.start - start : at.end - start] = at.states[self.index].slots
            at = _up(at)
        return slots

    def touch(self, node: Node, now: int) -> None:
        """The last runs are used by a match, and only those: a run is split where they begin."""
        page = self.tree.page_size
        at, low = node, max(0, node.end - self.need) // page * page
        while at.end > low:
            run: Run | None = at.states[self.index]
            if run is not None:
                if at.start < low:
                    self.tree.split(at, low - at.start)
                self.use(run, now)
            at = _up(at)

    def fill(self, node: Node, slots: IntArray) -> None:
        """A run, or a tombstone from the start."""
        if slots[0] >= 0:
            self.add(node, slots)

    def merge(self, nodes: Sequence[Node], slots: IntArray) -> bool:
        """Heal the tombstones that the publisher has slots for; its copies of the rest are not needed."""
        healed, first = False, nodes[0].start
        for node in nodes:
            own = slots[node.start - first : node.end - first]
            if own[0] < 0:
                continue
            if node.states[self.index] is None:
                self.add(node, own)
                healed = True
            else:
                self.free(own.copy())
        return healed

    def split(self, upper: Node, lower: Node) -> None:
        """Whoever needs the node needs both halves."""
        run: Run | None = lower.states[self.index]
        if run is None or run.slots is None:
            return
        at, slots = upper.tokens, run.slots
        upper.states[self.index] = head = Run(upper, slots[:at].copy())
        run.slots = slots[at:].copy()
        head.locks, head.last_access, head.level = run.locks, run.last_access, run.level
        if not run.locks:
            self.heap.offer(head)
            self.heap.offer(run)

    def check(self, ends: Sequence[tuple[Node, int]]) -> None:
        """Locks against leases, counts against runs, the heap against both."""
        needed: Counter[int] = Counter()
        for node, low in ends:
            at = node
            while at.end > low:
                assert at.states[self.index] is not None, "a lease's window has a gap"
                assert at.start >= low, "a node that a lease needs in part"
                needed[id(at)] += 1
                at = _up(at)
        self.check_runs(needed)


def _up(node: Node) -> Node:
    """The parent of a node that is not a root."""
    assert node.parent is not None, "a window that begins before its root"
    return node.parent
