"""The prefix cache for models whose layers all keep full attention state: one radix tree over tokens."""

from __future__ import annotations

from array import array

import numpy as np
from pydantic import BaseModel, ConfigDict

from phloem.batch import IntArray
from phloem.errors import PluginError
from phloem.interfaces import CacheCounts, CacheListener, Eviction, Lease, Match, PluginContext, PoolGroup, Published
from phloem.model_spec import ModelSpec
from phloem.request import Namespace

from ._check import check_tree
from ._heap import LeafHeap
from ._tree import Node, Root, Tree


class RadixLease:
    """A hold on the prefix that ends at `node`. The cache that made it knows whether it is still held."""

    __slots__ = ("length", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.length = node.end


class RadixCache:
    """Shares every published prefix, to the page. Structure after RadixAttention (Zheng et al., arXiv 2312.07104).

    A match costs O(nodes on the path) plus a few C-level compares each; a lease or release O(nodes whose state
    changes); an eviction O(log leaves). Where a match or an eviction ends inside a node, the node is split, so
    protection and eviction are exact to the page. Called by the scheduler only, on its thread.
    """

    api = 1
    capabilities: frozenset[str] = frozenset({"sharing", "uses"})

    class Options(BaseModel):
        """This cache has no options beside those of the `cache` section itself."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        rule: Eviction | None = context.extras.get("eviction")
        if rule is None or len(context.pools) != 1:
            raise PluginError(
                f"cache.{context.name} got {len(context.pools)} pools and eviction rule {rule!r}",
                hint="it needs the one pool that groups() asks for, and a rule in context.extras['eviction']",
            )
        self.version = 0
        self._pool = context.pools[0]
        self._page = context.page_size
        self._tree = Tree(context.page_size)
        self._heap = LeafHeap(rule, self._tree)
        self._leases: set[RadixLease] = set()
        self._listeners: tuple[CacheListener, ...] = ()

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool for all layers: a token has a slot in all or none."""
        return (PoolGroup("full", tuple(range(len(spec.layers)))),)

    def match(self, tokens: array[int], limit: int, namespace: Namespace) -> Match:
        """Longest cached prefix of tokens[:limit], page-floored. Splits at its end and refreshes recency."""
        now = self._tree.tick()
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(0, Root(namespace, now))  # enters the tree when leased
        node = self._descend(root, tokens, limit)
        self._tree.touch(node, now)
        if node.is_candidate:
            self._heap.offer(node)
        return Match(node.end, node)

    def peek(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """Length that `match` would find. Changes nothing."""
        root = self._tree.roots.get(namespace)
        if root is None:
            return 0
        node, _, part = self._tree.walk(root, tokens, self._floor(min(limit, len(tokens))))
        return node.end + part

    def lease(self, match: Match) -> Lease:
        """Protect a match's path. Raises AssertionError if the cache changed so that the match is gone."""
        node: Node = match.node
        if isinstance(node, Root):
            node = self._tree.roots.setdefault(node.namespace, node)
        elif node.parent is None or node.end != match.length:
            raise AssertionError(f"a match of {match.length} tokens was evicted before it was leased")
        return self._hold(node)

    def slots(self, lease: Lease) -> tuple[IntArray, ...]:
        """The slots of the leased tokens: a new array [lease.length] of int32."""
        return (_gather(self._held(lease).node, 0),)

    def publish(
        self, tokens: array[int], length: int, slots: tuple[IntArray, ...], lease: Lease, namespace: Namespace
    ) -> Published:
        """Adopt the whole pages of tokens[:length] that are new; see `Cache.publish`.

        Starts where the lease ends: costs O(new tokens) copying, whatever the length before them. Raises
        AssertionError for a released lease, another namespace than the lease's, or a length below the lease's.
        """
        anchor = self._held(lease).node
        start = anchor.end
        (mine,) = slots
        if length < start or len(mine) < length or len(tokens) < length:
            raise AssertionError(
                f"publish of {length} tokens: {start} are leased, {len(mine)} slots and {len(tokens)} tokens given"
            )
        if anchor.root.namespace != namespace:
            raise AssertionError(f"publish into {namespace} under a lease in {anchor.root.namespace}")
        end = self._floor(length)
        node = self._descend(anchor, tokens, end)
        self._pool.release(mine[start : node.end])  # the cache has these already
        if node.end < end:
            key, kept = tokens[node.end : end], mine[node.end : end].astype(np.int32)  # a copy: the caller's may change
            node = self._tree.attach(node, key, kept, self._tree.tick())
            self.version += 1
            for listener in self._listeners:
                listener.stored(namespace, self._tree.text(node), node.end - node.tokens)
        longer = self._hold(node)
        self.release(lease)
        return Published(longer, (_gather(node, start),))

    def release(self, lease: Lease) -> None:
        """End a lease. Raises AssertionError if it was released before."""
        held = self._held(lease)
        self._leases.remove(held)
        node = held.node
        self._tree.unlock(node, self._tree.tick())
        if node.is_candidate:
            self._heap.offer(node)
        else:
            self._tree.prune(node.root)

    def used(self, lease: Lease, found: int, priority: int) -> None:
        """Count a use of the leased path; see `CountsUses.used`."""
        self._tree.used(self._held(lease).node, found, priority)

    def evict(self, slots: int, group: int = 0) -> int:
        """Free `slots` slots, rounded up to pages, or all that is evictable if that is less; returns how many.

        Of a leaf that is longer than what is missing only the tail goes.
        """
        assert group == 0, f"group {group} of a cache with one"
        freed: list[IntArray] = []
        missing = -(-slots // self._page) * self._page
        try:
            while missing > 0 and (node := self._heap.pop()) is not None:
                if node.tokens > missing:
                    self._split(node, node.tokens - missing)
                missing -= node.tokens
                freed.append(node.slots)
                for listener in self._listeners:
                    listener.removed(node.root.namespace, self._tree.text(node), node.end - node.tokens)
                parent = self._tree.remove(node)
                if parent.is_candidate:
                    self._heap.offer(parent)
        finally:  # a rule that raises must not cost slots
            count = self._give_back(freed)
        return count

    def counts(self) -> tuple[CacheCounts, ...]:
        """Evictable and protected slots."""
        return (CacheCounts(self._tree.evictable, self._tree.protected),)

    def reset(self) -> None:
        """Drop every prefix that no lease ends at or below. Walks the tree."""
        self._heap.clear()
        doomed = [node for node in self._tree.nodes() if not node.locks]
        for node in reversed(doomed):  # children before parents
            self._tree.remove(node)
        self._give_back([node.slots for node in doomed])
        for listener in self._listeners:
            listener.cleared()
            self.listen(listener)

    def listen(self, listener: CacheListener) -> None:
        """Tell `listener` of what is stored now, and from now on of what is stored and removed, node by node."""
        if listener not in self._listeners:
            self._listeners += (listener,)
        for node in self._tree.nodes():
            listener.stored(node.root.namespace, self._tree.text(node), node.end - node.tokens)

    def check(self) -> None:
        """Verify tree, locks, counts, heap and slots at any size; raises AssertionError naming what is wrong."""
        for lease in self._leases:
            assert lease.node.end == lease.length, f"a lease of {lease.length} tokens ends at {lease.node.end}"
        check_tree(self._tree, [lease.node for lease in self._leases])
        self._heap.check(sum(node.is_candidate for node in self._tree.nodes()))
        owned = [int(slot) for node in self._tree.nodes() for slot in node.slots[:: self._page]]
        assert len(set(owned)) == len(owned), "a page lies at two places of the tree"
        free = self._pool.free_set()
        assert len(free) * self._page == self._pool.free, "a page is free twice"
        assert free.isdisjoint(slot // self._page for slot in owned), "a page of the tree is also free"

    def owned_pages(self) -> list[set[int]]:
        """Every page in the tree."""
        return [{int(slot) // self._page for node in self._tree.nodes() for slot in node.slots[:: self._page]}]

    def _floor(self, length: int) -> int:
        return length // self._page * self._page

    def _descend(self, node: Node, tokens: array[int], limit: int) -> Node:
        """The node at which the longest cached prefix of tokens[:limit] ends, below `node`; split off if need be."""
        node, child, part = self._tree.walk(node, tokens, self._floor(min(limit, len(tokens))))
        return node if child is None else self._split(child, part)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` tokens; returns the upper half. No count changes."""
        upper = self._tree.split(node, at)
        # copies: a view would keep the whole array alive after either half is gone
        upper.slots, node.slots = node.slots[:at].copy(), node.slots[at:].copy()
        if node.is_candidate:
            self._heap.offer(node)  # its size may matter to the rule
        return upper

    def _hold(self, node: Node) -> RadixLease:
        self._tree.lock(node)
        lease = RadixLease(node)
        self._leases.add(lease)
        return lease

    def _held(self, lease: Lease) -> RadixLease:
        if not isinstance(lease, RadixLease) or lease not in self._leases:
            raise AssertionError("this lease was released or published before, or is another cache's")
        return lease

    def _give_back(self, freed: list[IntArray]) -> int:
        if not freed:
            return 0
        slots = np.concatenate(freed)
        self._pool.release(slots)
        self.version += 1
        return len(slots)


def _gather(node: Node, start: int) -> IntArray:
    """The slots of the tokens from `start`, a node boundary, to the end of `node`: a new array."""
    parts: list[IntArray] = []
    at: Node | None = node
    while at is not None and at.end > start:
        parts.append(at.slots)
        at = at.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)
