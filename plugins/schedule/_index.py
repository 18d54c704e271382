"""The waiting index: which request is best, given what is cached now, at the cost of what changed (design §7).

Every request has a rank that never changes while it waits; its key is that rank minus its cached tokens, and the
smallest key goes first. Requests whose match ends at the same place of the trie have the same number of cached tokens,
so among them the smallest rank is best, and only one request for each such place competes. When a prefix is stored or
removed, the places along that one path change, however many requests hang below.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from phloem.request import Namespace, Request

from ._trie import Node, Rank, Root, Trie

_SLACK = 32  # stale heap entries tolerated before a rebuild, however few are live


class WaitingIndex:
    """All waiting requests, best first. A `CacheListener`; used on the loop's thread.

    Adding and removing cost O(depth log n), an event of the cache O(nodes on its path log n), the next best request
    amortised O(depth log n). Heaps are lazy: an entry is judged when it comes to the top, and a heap in which more than
    half is stale is rebuilt.
    """

    def __init__(self, page_size: int, rank: Callable[[Request], float]) -> None:
        """`rank(request)` in tokens, asked once when it is added."""
        self.trie = Trie(page_size)
        self._rank = rank
        self._where: dict[Request, tuple[Node, Rank]] = {}
        self._aside: dict[Request, None] = {}  # yielded in this pass and still waiting
        self._heap: list[tuple[float, int, int, Node]] = []  # (key, arrival, serial, place)
        self._places = 0  # nodes that are roots or covered
        self._serial = 0

    def __len__(self) -> int:
        return len(self._where)

    # --- requests

    def add(self, request: Request) -> None:
        """A request waits from now on. `request.matched` is what the cache has of it now."""
        trie, tokens = self.trie, request.keys
        end = request.match_limit // trie.page_size * trie.page_size
        node: Node | None = trie.roots.get(request.namespace)
        if node is None:
            node = trie.roots[request.namespace] = Root(request.namespace)
            self._places += 1
        for below, same in trie.walk(request.namespace, tokens[:end]):
            node = below if same == len(below.key) else self._split(below, same)
        if node.end < end:
            node = trie.grow(node, tokens[node.end : end], request.matched)
            self._places += node.covered > 0
        rank = (self._rank(request), request.arrival)
        self._where[request] = node, rank
        node.own += 1
        self._count(node, 1)
        self._push(node, rank, request)
        self._refresh(node)

    def remove(self, request: Request) -> None:
        """A request waits no more. Raises KeyError if it was never added."""
        node, _ = self._where.pop(request)
        node.own -= 1
        if self._aside.pop(request, request) is not None:
            self._count(node, -1)
        while not node.own and not node.children and not isinstance(node, Root):
            self._places -= node.covered > 0
            node = self.trie.cut(node)
        if isinstance(node, Root):
            if not node.own and not node.children:
                del self.trie.roots[node.namespace]
                self._places -= 1
                node.best = None
                return
        elif not node.own and len(node.children) == 1:
            self._merge(node)
            return
        self._refresh(node)

    def order(self) -> Iterator[Request]:
        """Best first, each request once. What is added, removed, stored or evicted meanwhile counts at once."""
        self.restore()
        while (request := self.first()) is not None:
            yield request
            self.pass_over(request)
        self.restore()

    def first(self) -> Request | None:
        """The best request that is not set aside."""
        while self._heap:
            key, arrival, _, node = self._heap[0]
            if self._key(node) == (key, arrival):
                return self.first_at(node)
            heappop(self._heap)
        return None

    def first_at(self, node: Node) -> Request:
        """The best of those whose match ends at `node`, which has some."""
        while True:
            self._top(node)
            thing = node.heap[0][2]
            if isinstance(thing, Request):
                return thing
            node = thing

    def pass_over(self, request: Request) -> None:
        """Leave a request out until `restore`, if it still waits."""
        if request in self._where and request not in self._aside:
            node = self._where[request][0]
            self._aside[request] = None
            self._count(node, -1)
            self._refresh(node)

    def restore(self) -> None:
        """Take back what was set aside."""
        aside, self._aside = self._aside, {}
        for request in aside:
            node, rank = self._where[request]
            self._count(node, 1)
            self._push(node, rank, request)
            self._refresh(node)

    def matched(self, request: Request) -> int:
        """Cached tokens of a waiting request. O(depth)."""
        node: Node | None = self._where[request][0]
        while node is not None and not node.covered and node.parent is not None:
            node = node.parent
        return node.depth if node is not None else 0

    # --- what the cache tells

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """`tokens` is a cached prefix now."""
        for node, same in self.trie.walk(namespace, tokens):
            self._cover(node, max(node.covered, same))

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Of the cached prefix `tokens` only the first `start` stay."""
        for node, same in self.trie.walk(namespace, tokens):
            if not node.covered:
                return
            if node.start + same > start:
                self._uncover(node, max(start - node.start, 0))
                return

    def cleared(self) -> None:
        """Nothing is cached."""
        for root in self.trie.roots.values():
            for node in list(root.lit):
                self._uncover(node, 0)

    # --- upkeep

    def _cover(self, node: Node, covered: int) -> None:
        """A node's parent is covered wholly, and so many tokens of its own run are cached now."""
        before, node.covered = node.covered, covered
        if before == covered:
            return
        parent = node.parent
        assert parent is not None, "a root has no run"
        if not before:
            self._places += 1
            parent.lit[node] = None
            self._refresh(parent)
        elif not covered:
            self._places -= 1
            del parent.lit[node]
            if node.best is not None:
                self._push(parent, node.best, node)
            self._refresh(parent)
        if covered:
            self._offer(node)

    def _uncover(self, node: Node, covered: int) -> None:
        """At most `covered` tokens of a node's run are cached, and nothing below it."""
        below = [node]
        for at in below:  # grows: parents before children
            below.extend(at.lit)
        for at in reversed(below[1:]):
            self._cover(at, 0)
        self._cover(node, min(node.covered, covered))

    def _split(self, node: Node, at: int) -> Node:
        upper = self.trie.split(node, at)
        self._places += upper.covered > 0 and node.covered > 0
        if not node.covered:
            upper.best = node.best
            if node.best is not None:
                self._push(upper, node.best, node)
        if upper.covered:
            self._offer(upper)
        elif upper.best is not None:
            assert upper.parent is not None
            self._push(upper.parent, upper.best, upper)
        return upper

    def _merge(self, node: Node) -> None:
        self._places -= node.covered > 0 and bool(node.lit)
        child = self.trie.merge(node)
        if child.covered:
            self._offer(child)
        else:
            assert child.parent is not None
            if child.best is not None:
                self._push(child.parent, child.best, child)
            self._refresh(child.parent)

    @staticmethod
    def _count(node: Node | None, by: int) -> None:
        while node is not None:
            node.count += by
            node = node.parent

    # --- lazy heaps

    def _push(self, node: Node, rank: Rank, thing: Node | Request) -> None:
        """Enter a request that hangs at a node, or a child that is not covered, into the node's heap."""
        self._serial += 1
        heappush(node.heap, (rank, self._serial, thing))
        if len(node.heap) > 2 * (node.own + len(node.children)) + _SLACK:
            live = {thing: (rank, serial, thing) for rank, serial, thing in node.heap if self._holds(node, rank, thing)}
            node.heap = list(live.values())
            heapify(node.heap)

    def _holds(self, node: Node, rank: Rank, thing: Node | Request) -> bool:
        """An entry of a node's heap is not stale."""
        if isinstance(thing, Node):
            return thing.parent is node and not thing.covered and thing.best == rank
        return self._where.get(thing) == (node, rank) and thing not in self._aside

    def _top(self, node: Node) -> Rank | None:
        """The best rank in a node's heap, after dropping what is stale above it."""
        heap = node.heap
        while heap:
            rank, _, thing = heap[0]
            if self._holds(node, rank, thing):
                return rank
            heappop(heap)
        return None

    def _refresh(self, node: Node) -> None:
        """Renew `best` of a node and, as far as that shows, of those above; the place where it ends competes anew."""
        while True:
            best = self._top(node)
            if best == node.best:
                return
            node.best = best
            if node.covered or node.parent is None:
                self._offer(node)
                return
            if best is not None:
                self._push(node.parent, best, node)
            node = node.parent

    def _key(self, node: Node) -> tuple[float, int] | None:
        """What a place competes with; None if it is none, or has nothing to offer."""
        if node.best is None or not (node.covered or isinstance(node, Root)):
            return None
        if node.parent is None and not isinstance(node, Root):
            return None
        return node.best[0] - node.depth, node.best[1]

    def _offer(self, node: Node) -> None:
        """A place's key may have changed."""
        key = self._key(node)
        if key is None:
            return
        self._serial += 1
        heappush(self._heap, (*key, self._serial, node))
        if len(self._heap) > 2 * self._places + _SLACK:
            live = {entry[3]: entry for entry in self._heap if self._key(entry[3]) == entry[:2]}
            self._heap = list(live.values())
            heapify(self._heap)
