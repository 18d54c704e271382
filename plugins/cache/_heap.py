"""The order of eviction: a lazy heap over what may be evicted."""

from __future__ import annotations

import heapq
from typing import Any, Generic, Protocol, TypeVar

from phloem.interfaces import Eviction, EvictionNode

from ._tree import Tree

_SLACK = 64  # stale entries tolerated before a rebuild, however small the heap


class Candidate(EvictionNode, Protocol):
    """What a heap holds: a node, or the state of one group at a node."""

    entry: Any  # its live entry in the heap

    @property
    def is_candidate(self) -> bool: ...


T = TypeVar("T", bound=Candidate)


class Heap(Generic[T]):
    """Yields what may be evicted, smallest key of the rule first. O(log n) amortised; never walks the tree.

    Nothing is taken out when a candidate is locked, gets a child or is used again: an entry is judged when it comes to
    the top. One in use goes (it is offered again when that ends); one whose key has grown goes back with the new key.
    A key that has shrunk is pushed at once, by `offer`, and the older entry turns stale.

    For a rule with the capability `ageing` the tree's level rises to each key that is evicted.
    """

    def __init__(self, rule: Eviction, tree: Tree) -> None:
        self._rule, self._tree = rule, tree
        self._ages = "ageing" in getattr(rule, "capabilities", ())
        self._entries: list[tuple[Any, int, T]] = []
        self._pushed = 0  # serial numbers break ties, oldest first, and keep nodes from being compared
        self._live = 0

    def offer(self, node: T) -> None:
        """`node` became a candidate, or is one whose key may have changed."""
        key = self._rule.key(node)
        if node.entry is not None:
            if not key < node.entry[0]:
                return
            self._live -= 1
        self._pushed += 1
        entry = (key, self._pushed, node)
        heapq.heappush(self._entries, entry)
        node.entry = entry
        self._live += 1
        if len(self._entries) > 2 * self._live + _SLACK:
            self._entries = [entry for entry in self._entries if entry[2].entry is entry]
            heapq.heapify(self._entries)

    def pop(self) -> T | None:
        """The next one to evict, or None if nothing is evictable."""
        entries = self._entries
        while entries:
            entry = entries[0]
            node = entry[2]
            if node.entry is entry:
                if node.is_candidate:
                    key = self._rule.key(node)
                    if entry[0] < key:
                        self._pushed += 1
                        node.entry = (key, self._pushed, node)
                        heapq.heapreplace(entries, node.entry)
                        continue
                node.entry = None
                self._live -= 1
                heapq.heappop(entries)
                if node.is_candidate:
                    if self._ages:
                        self._tree.level = max(self._tree.level, entry[0])
                    return node
            else:
                heapq.heappop(entries)
        return None

    def clear(self) -> None:
        """Forget all entries; what is still a candidate has to be offered again."""
        for _, _, node in self._entries:
            node.entry = None
        self._entries.clear()
        self._live = 0

    def check(self, candidates: int) -> None:
        """Verify the entries against the number of candidates, each of which holds a live one."""
        live = [entry for entry in self._entries if entry[2].entry is entry]
        assert len(live) == self._live, f"{len(live)} live heap entries, {self._live} counted"
        good = sum(node.is_candidate and not self._rule.key(node) < key for key, _, node in live)
        assert good == candidates, f"{candidates} candidates, {good} well placed in the heap"
