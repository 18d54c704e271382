"""What `radix`, `swa` and `hybrid` have in common: one tree over tokens, and a component for each state group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import ClassVar, cast

from pydantic import BaseModel, ConfigDict

from phloem.batch import IntArray
from phloem.components import Component, Place
from phloem.errors import PluginError
from phloem.interfaces import CacheCounts, CacheListener, Eviction, Lease, Match, PluginContext, PoolGroup, Published
from phloem.model_spec import ModelSpec
from phloem.registry import construct
from phloem.request import Namespace
from phloem.storage import Leaving

from ._check import check_cache
from ._full import Full
from ._heap import Heap
from ._recurrent import Recurrent
from ._spill import Spill
from ._tree import Node, Root, Tree
from ._window import Window

BUILT_IN: dict[str, type[Component]] = {"full": Full, "window": Window, "recurrent": Recurrent}
# Of an inner node so many tokens are evicted at once, where it has them: each cut leaves one node more on the path.
CUT_TOKENS = 64


class TreeLease:
    """A hold on the prefix that ends at `node`. The cache that made it knows whether it is still held."""

    __slots__ = ("length", "lows", "node")

    def __init__(self, node: Node, lows: list[int]) -> None:
        self.node = node
        self.length = node.end
        self.lows = lows  # per component, where what it protects begins


class TreeCache(ABC):
    """Shares every published prefix, to the page. Structure after RadixAttention (Zheng et al., arXiv 2312.07104).

    A match costs O(nodes on the path) plus a few C-level compares each; a lease or release O(nodes whose state
    changes); an eviction O(log candidates). Where a match, a lease's window or an eviction ends inside a node, the node
    is split, so protection and eviction are exact to the page. Called by the scheduler only, on its thread.
    """

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset({"sharing", "uses", "components"})

    class Options(BaseModel):
        """This cache has no options beside those of the `cache` section itself."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        rule: Eviction | None = context.extras.get("eviction")
        groups = (PoolGroup("full", ()),) if context.model is None else self.groups(context.model)
        if rule is None or len(context.pools) != len(groups):
            raise PluginError(
                f"cache.{context.name} got {len(context.pools)} pools and eviction rule {rule!r}",
                hint="it needs the pools that groups() asks for, and a rule in context.extras['eviction']",
            )
        self.version = 0
        self._page = context.page_size
        self._tree = tree = Tree(context.page_size)
        self._components = [_component(context, tree, i, group, rule) for i, group in enumerate(groups)]
        tree.components = self._components
        self._bounded = [part for part in self._components if part.bounds]  # may end a match early
        self._windows = [part for part in self._bounded if part.divisible]
        self._leases: set[TreeLease] = set()
        self._listeners: tuple[CacheListener, ...] = ()
        self._spill = Spill(self._components)

    @classmethod
    @abstractmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """The pools, one for each component."""

    # --- matches and leases

    def match(self, tokens: array[int], limit: int, namespace: Namespace) -> Match:
        """Longest prefix of tokens[:limit] that every component can go on from, page-floored.

        Splits at its end and refreshes recency.
        """
        now = self._tree.tick()
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(0, Root(namespace, now))  # enters the tree when leased
        node, end, shared = self._find(root, tokens, limit)
        if end < node.end:
            node = self._tree.split(node, end - node.start)
        self._tree.touch(node, now)
        for part in self._components:
            part.touch(node, now)
        return Match(node.end, node, shared)

    def peek(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """Length that `match` would find. Changes nothing."""
        root = self._tree.roots.get(namespace)
        return 0 if root is None else self._find(root, tokens, limit)[1]

    def lease(self, match: Match) -> Lease:
        """Protect a match's path. Raises AssertionError if the cache changed so that the match is gone."""
        node: Node = match.node
        if isinstance(node, Root):
            node = self._tree.roots.setdefault(node.namespace, node)
        elif node.parent is None or node.end != match.length or self._agreed(node, node.end)[1] < node.end:
            raise AssertionError(f"a match of {match.length} tokens was evicted before it was leased")
        return self._hold(node)

    def slots(self, lease: Lease) -> tuple[IntArray, ...]:
        """Per group, the slots of the leased tokens: new arrays [lease.length] of int32, -1 what it does not need."""
        held = self._held(lease)
        return self._gather(held, 0)

    def release(self, lease: Lease) -> None:
        """End a lease. Raises AssertionError if it was released before."""
        held = self._held(lease)
        self._release(held, self._tree.tick(), ends=True)
        self._settle(held.node)
        if self._bounded:
            self._flush()

    def narrow(self, lease: Lease, start: int, group: int) -> None:
        """See `Narrows.narrow`."""
        held, part = self._held(lease), self._components[group]
        if part.bounds:
            held.lows[group] = part.narrow(held.node, held.lows[group], start)

    def used(self, lease: Lease, found: int, priority: int) -> None:
        """Count a use of the leased path; see `CountsUses.used`."""
        self._tree.used(self._held(lease).node, found, priority)

    # --- publishing

    def publish(
        self, tokens: array[int], length: int, slots: tuple[IntArray, ...], lease: Lease, namespace: Namespace
    ) -> Published:
        """Adopt the whole pages of tokens[:length] that are new; see `Cache.publish`.

        Starts where the lease ends: costs O(new tokens) copying, whatever the length before them. Raises
        AssertionError for a released lease, another namespace than the lease's, or a length below the lease's.
        """
        held = self._held(lease)
        anchor, start = held.node, held.length
        if length < start or min(map(len, slots)) < length or len(tokens) < length:
            raise AssertionError(
                f"publish of {length} tokens: {start} are leased, {min(map(len, slots))} slots and {len(tokens)} "
                "tokens given"
            )
        if anchor.root.namespace != namespace:
            raise AssertionError(f"publish into {namespace} under a lease in {anchor.root.namespace}")
        end = length // self._page * self._page
        cuts = [cut for part in self._windows if (cut := _first(slots[part.index], start, end)) > start]
        node, child, at = self._tree.walk(anchor, tokens, end)
        node = node if child is None else self._tree.split(child, at)
        shared = node.end
        if shared > start:
            self._merge(anchor, node, slots, cuts)
        if shared < end:
            ends = sorted({cut for cut in cuts if shared < cut < end}) if cuts else []
            node = self._extend(node, tokens, slots, [*ends, end])
            self._flush(changed=True)
            for listener in self._listeners:
                listener.stored(namespace, tokens[:end], shared)
        longer = self._hold(node)
        self._release(held, self._tree.tick(), ends=False)
        return Published(longer, self._gather(longer, start))

    def _merge(self, anchor: Node, node: Node, slots: tuple[IntArray, ...], cuts: list[int]) -> None:
        """What lies between two nodes is published again: it may fill gaps, and the rest is given back."""
        start, end = anchor.end, node.end
        path: list[Node] = []
        at = node
        while at is not anchor:
            inside = [cut for cut in cuts if at.start < cut < at.end]
            upper = self._tree.split(at, max(inside) - at.start) if inside else None
            path.append(at)
            assert at.parent is not None
            at = upper or at.parent
        path.reverse()
        healed = False
        for part in self._components:
            healed |= part.merge(path, slots[part.index][start:end])
        self._flush(changed=healed)

    def _extend(self, node: Node, tokens: array[int], slots: tuple[IntArray, ...], cuts: list[int]) -> Node:
        """New nodes below `node`, one up to each cut: a component has slots for all of a node or for none."""
        now = self._tree.tick()
        for cut in cuts:
            start = node.end
            node = self._tree.attach(node, tokens[start:cut], now)
            for part in self._components:
                part.fill(node, slots[part.index][start:cut])
        return node

    # --- eviction

    def evict(self, slots: int, group: int = 0) -> int:
        """Free `slots` slots, rounded up to pages, or all that is evictable if that is less; returns how many.

        Of a leaf that is longer than what is missing only the tail goes, in all groups; of the run of an inner node,
        which only a window can miss, only the head. A state goes as a whole.
        """
        assert 0 <= group < len(self._components), f"group {group} of a cache with {len(self._components)}"
        part = self._components[group]
        page = part.pool.page_size
        wanted = -(-slots // page) * page
        freed = 0
        try:
            while (missing := wanted - part.freed) > 0 and (node := cast("Node | None", part.pop())) is not None:
                if node.is_candidate:
                    if part.divisible and node.tokens > missing:
                        self._tree.split(node, node.tokens - missing)
                    self._settle(self._remove(node))
                else:
                    cut = max(missing, -(-CUT_TOKENS // page) * page)
                    gone = self._tree.split(node, cut) if part.divisible and node.tokens > cut else node
                    self._spill.leaves(gone, stays=not part.divisible)
                    part.bury(gone)
        finally:  # a rule that raises must not cost slots
            freed = part.freed
            self._flush()
        return freed

    def _remove(self, node: Node) -> Node:
        """Take an unlocked leaf out of the tree; returns its parent."""
        self._spill.leaves(node)
        for listener in self._listeners:
            listener.removed(node.root.namespace, self._tree.text(node), node.start)
        for part in self._components:
            part.drop(node)
        return self._tree.remove(node)

    def _settle(self, node: Node) -> None:
        """`node` may be an unlocked leaf now: a candidate, or, where a component has nothing for it, of no use.

        No match can end at a tombstone, and who computes it again brings its own slots.
        """
        while node.is_candidate:
            if not self._bounded or all(part.ends(node) for part in self._bounded):
                for part in self._components:
                    part.ready(node)
                return
            node = self._remove(node)
        self._tree.prune(node.root)

    def spill(self, taker: Leaving, block: int) -> None:
        """See `Spills.spill`."""
        self._spill.taker, self._spill.block = taker, block

    def kept(self, lease: Lease) -> tuple[IntArray, ...]:
        """See `Spills.kept`."""
        return self._spill.kept(self._held(lease).node)

    def reset(self) -> None:
        """Drop all that no lease protects. Walks the tree."""
        for part in self._components:
            part.clear()
        doomed = [node for node in self._tree.nodes() if not node.locks]
        for node in reversed(doomed):  # children before parents
            for part in self._components:
                part.drop(node)
            self._tree.remove(node)
        self._flush()
        for listener in self._listeners:
            listener.cleared()
            self.listen(listener)

    def listen(self, listener: CacheListener) -> None:
        """Tell `listener` of what is stored now, and from now on of what is stored and removed, node by node."""
        if listener not in self._listeners:
            self._listeners += (listener,)
        for node in self._tree.nodes():
            listener.stored(node.root.namespace, self._tree.text(node), node.start)

    # --- counts and checks

    def counts(self) -> tuple[CacheCounts, ...]:
        """Evictable and protected slots."""
        return tuple(part.counts() for part in self._components)

    def check(self) -> None:
        """Verify tree, locks, counts, heaps and slots at any size; raises AssertionError naming what is wrong."""
        check_cache(self._tree, self._components, [(lease.node, lease.length, lease.lows) for lease in self._leases])

    def owned_pages(self) -> list[set[int]]:
        """Every page in the tree."""
        owned: list[set[int]] = []
        for part in self._components:
            held = [slots for node in self._tree.nodes() if (slots := part.slots(node)) is not None]
            page = part.pool.page_size
            owned.append({int(slot) // page for slots in held for slot in slots[::page]})
        return owned

    # --- helpers

    def _find(self, root: Root, tokens: array[int], limit: int) -> tuple[Node, int, int]:
        """The longest usable prefix of tokens[:limit], the node that holds its last token, and the longest stored."""
        limit = min(limit, len(tokens))
        node, child, part = self._tree.walk(root, tokens, limit // self._page * self._page)
        end = node.end + part
        if child is not None and part:
            node = child
        return (*self._agreed(node, end), end) if self._bounded else (node, end, end)

    def _agreed(self, bottom: Node, end: int) -> tuple[Node, int]:
        """The longest prefix of `end` tokens that all components can go on from, and the node that holds its end."""
        agreed, i = 0, 0
        while agreed < len(self._bounded):
            shorter = self._bounded[i].reach(bottom, end)
            agreed = agreed + 1 if shorter == end else 1
            end, i = shorter, (i + 1) % len(self._bounded)
            while bottom.start >= end and bottom.parent is not None:
                bottom = bottom.parent
        return bottom, end

    def _hold(self, node: Node) -> TreeLease:
        self._tree.lock(node)
        lease = TreeLease(node, [0] * len(self._components))
        for part in self._bounded:
            lease.lows[part.index] = part.lock(node)
        self._leases.add(lease)
        return lease

    def _release(self, held: TreeLease, now: int, *, ends: bool) -> None:
        """Unlock a lease's path; `ends`: its holder leaves it, else it has a longer one."""
        self._leases.remove(held)
        self._tree.unlock(held.node, now)
        for part in self._bounded:
            part.unlock(held.node, held.lows[part.index], now if ends else None)

    def _held(self, lease: Lease) -> TreeLease:
        if not isinstance(lease, TreeLease) or lease not in self._leases:
            raise AssertionError("this lease was released or published before, or is another cache's")
        return lease

    def _gather(self, lease: TreeLease, start: int) -> tuple[IntArray, ...]:
        return tuple([part.gather(lease.node, lease.lows[part.index], start) for part in self._components])

    def _flush(self, *, changed: bool = False) -> None:
        """Give back what has left the tree."""
        for part in self._components:
            if part.freed:
                changed |= part.flush() > 0
        self.version += changed


def _component(context: PluginContext, tree: Tree, index: int, group: PoolGroup, rule: Eviction) -> Component:
    """That of one group: as configured, else the built-in one of its kind."""
    default = (group.kind, BUILT_IN[group.kind], None)
    name, plugin, options = context.extras.get("components", {}).get(group.kind, default)
    place = Place(tree, index, group, lambda: Heap(rule, tree))
    given = PluginContext("component", name, context.model, pools=(context.pools[index],), page_size=tree.page_size)
    given.extras["place"] = place
    made: Component = construct("component", name, plugin, options or plugin.Options(), given)
    return made


def _first(slots: IntArray, start: int, end: int) -> int:
    """Where the slots of tokens [start, end) begin: those before are -1."""
    given = slots[start:end] >= 0
    return start + (int(given.argmax()) if given.any() else end - start)
