"""What the layers of one state group keep at the nodes of the tree: the part that full and windowed groups share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from phloem.batch import IntArray
from phloem.interfaces import CacheCounts
from phloem.pool import SlotPool

from ._tree import Node, Tree


class Component(ABC):
    """One state group of one tree: its entry `node.states[index]`, its pool, its order of eviction.

    Slots that leave the tree are gathered and go back to the pool together, by `flush`: a rule that raises in the
    middle of an eviction costs none.
    """

    divisible: ClassVar[bool] = True  # slots are tokens': a node may lose some of them

    def __init__(self, tree: Tree, index: int, pool: SlotPool) -> None:
        self.tree, self.index, self.pool = tree, index, pool
        self.freed = 0  # slots that `flush` will return
        self._freed: list[IntArray] = []

    # --- what a match may use, and what a lease protects

    @abstractmethod
    def reach(self, bottom: Node, end: int) -> int:
        """The longest prefix of at most `end` tokens, on the path to `bottom`, that this group can go on from.

        `bottom` holds the last of the `end` tokens. O(nodes looked at).
        """

    def ends(self, node: Node) -> bool:
        """Whether a match can end within this node."""
        return True

    @abstractmethod
    def lock(self, node: Node) -> int:
        """Protect what a lease that ends at `node` needs; returns where that begins. May split nodes."""

    @abstractmethod
    def unlock(self, node: Node, low: int, now: int | None) -> None:
        """Undo a `lock` that began at `low`; `now` where a request ends here, None where it goes on elsewhere."""

    def narrow(self, node: Node, low: int, start: int) -> int:
        """See `Narrows.narrow`, of a lock that began at `low`; returns where it begins now. May split nodes."""
        return low

    @abstractmethod
    def gather(self, node: Node, low: int, start: int) -> IntArray:
        """Slots of the tokens from `start` to the end of `node`, new; -1 for those before `low`. Node boundaries."""

    @abstractmethod
    def touch(self, node: Node, now: int) -> None:
        """A match ended at `node`; the nodes' own recency is refreshed already."""

    # --- what comes and goes

    @abstractmethod
    def fill(self, node: Node, slots: IntArray) -> None:
        """The state of a new node; `slots` are the publisher's, all -1 where it had none any more."""

    @abstractmethod
    def merge(self, nodes: Sequence[Node], slots: IntArray) -> bool:
        """Somebody published what is in the tree: `slots` of the consecutive `nodes`. True if a match may grow."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """See `Tree.split`."""

    @abstractmethod
    def drop(self, node: Node) -> None:
        """The node leaves the tree."""

    # --- eviction

    @abstractmethod
    def ready(self, node: Node) -> None:
        """The node is an unlocked leaf now."""

    @abstractmethod
    def pop(self) -> Node | None:
        """The node whose state goes next, out of the order of eviction; None if nothing may."""

    @abstractmethod
    def bury(self, node: Node) -> None:
        """Free the state of a node that stays in the tree."""

    @abstractmethod
    def clear(self) -> None:
        """Everything that no lease protects is about to go: forget the order of eviction."""

    @abstractmethod
    def counts(self) -> CacheCounts:
        """Slots that may be evicted, and slots that leases protect. O(1)."""

    # --- for `check()`

    @abstractmethod
    def slots(self, node: Node) -> IntArray | None:
        """The slots at a node."""

    @abstractmethod
    def check(self, ends: Sequence[tuple[Node, int]]) -> None:
        """Recount everything; `ends` are (node, low) of all leases. Raises AssertionError."""

    # --- shared

    def free(self, slots: IntArray) -> None:
        """These slots have left the tree."""
        self._freed.append(slots)
        self.freed += len(slots)

    def flush(self) -> int:
        """Return to the pool what has left the tree; how many slots."""
        count, self.freed = self.freed, 0
        if self._freed:
            freed, self._freed = self._freed, []
            self.pool.release(np.concatenate(freed))
        return count


def whole(state: Any) -> IntArray:
    """A copy of slots that belong to somebody else, who goes on using the array."""
    kept: IntArray = np.array(state, dtype=np.int32)
    return kept
