"""The order of eviction: a lazy heap over what may be evicted."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from phloem.interfaces import Eviction

from ._tree import Tree

log = logging.getLogger("phloem.cache")

_SLACK = 64  # stale entries tolerated before a rebuild, however small the heap


class Heap:
    """Yields what may be evicted, smallest key of the rule first. O(log n) amortised; never walks the tree.

    What it holds is a node or the run of one group at a node: an `EvictionNode` with `is_candidate`, and an attribute
    `entry` for the heap's live entry of it. An `Order`, to components.

    Nothing is taken out when a candidate is locked, gets a child or is used again: an entry is judged when it comes to
    the top. One in use goes (it is offered again when that ends); one whose key has grown goes back with the new key.
    A key that has shrunk is pushed at once, by `offer`, and the older entry turns stale.

    For a rule with the capability `ageing` the tree's level rises to each key that is evicted. A rule that raises, or
    whose keys do not compare, is logged and replaced by recency: it must cost no request, and leave no slot behind.
    """

    def __init__(self, rule: Eviction, tree: Tree) -> None:
        self._rule = rule
        self._key: Callable[[Any], Any] = rule.key
        self._tree = tree
        self._ages = "ageing" in getattr(rule, "capabilities", ())
        self._entries: list[tuple[Any, int, Any]] = []
        self._pushed = 0  # serial numbers break ties, oldest first, and keep nodes from being compared
        self._live = 0

    def offer(self, node: Any) -> None:
        """`node` became a candidate, or is one whose key may have changed."""
        try:
            self._enter(node)
        except Exception:
            self._fall_back(node)

    def _enter(self, node: Any) -> None:
        key = self._key(node)
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

    def pop(self) -> Any:
        """The next one to evict, or None if nothing is evictable."""
        while self._entries:
            node = self._entries[0][2]
            try:
                if self._judge():
                    return node
            except Exception:
                self._fall_back(node)
        return None

    def _fall_back(self, node: Any) -> None:
        """The rule failed on its way with `node`, which may have lost its entry."""
        log.exception("eviction rule %s failed: the least recently used goes first now", type(self._rule).__name__)
        self._key, self._ages = attrgetter("last_access"), False
        live = {entry[2]: None for entry in self._entries if entry[2].entry is entry} | {node: None}
        self._entries, self._live = [], 0
        for each in live:
            each.entry = None
            if each.is_candidate:
                self._enter(each)

    def _judge(self) -> bool:
        """Take the top entry out, or to where it belongs now; whether it is the next to evict."""
        entries, entry = self._entries, self._entries[0]
        node = entry[2]
        live = node.entry is entry
        if live and node.is_candidate:
            key = self._key(node)
            if entry[0] < key:
                self._pushed += 1
                node.entry = (key, self._pushed, node)
                heapq.heapreplace(entries, node.entry)
                return False
        if live:
            node.entry = None
            self._live -= 1
        heapq.heappop(entries)
        if not (live and node.is_candidate):
            return False
        if self._ages:
            self._tree.level = max(self._tree.level, entry[0])
        return True

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
        try:
            good = sum(node.is_candidate and not self._key(node) < key for key, _, node in live)
        except Exception:
            self._fall_back(live[0][2])
            return self.check(candidates)
        assert good == candidates, f"{candidates} candidates, {good} well placed in the heap"
