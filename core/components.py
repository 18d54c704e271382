"""The contract of kind `component`: what the layers of one state group keep at the nodes of the prefix tree.

The tree knows tokens, pages and namespaces; each state group of the model has a component, and an entry of its own at
every node (`node.states[index]`). `Component` is the contract, and the plugin `window` as it stands: a component of
another distribution is a subclass that replaces what it does otherwise, often a single method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
from pydantic import BaseModel, ConfigDict

from .batch import IntArray
from .eviction import EvictionNode
from .pool import SlotPool

if TYPE_CHECKING:
    from .interfaces import PluginContext, PoolGroup


class CacheCounts(NamedTuple):
    """Slots of one group that the cache owns."""

    evictable: int
    protected: int


class TreeNode(EvictionNode, Protocol):
    """A node as components see it: a run of tokens, whole pages. The runs from the root to here are a cached prefix."""

    states: list[Any]  # one entry per component, its own business; None says that it has nothing here
    entry: Any  # an order's, where nodes are what it orders

    @property
    def parent(self) -> TreeNode | None: ...  # None for a root, which is no run and has no states
    @property
    def start(self) -> int: ...  # length of the prefix before this run; `end` is that with it
    @property
    def root(self) -> Any: ...  # knows the `namespace`
    @property
    def is_candidate(self) -> bool: ...  # an unlocked leaf: it may leave the tree


class TreeView(Protocol):
    """What a component may ask of the tree it belongs to, and leave as it is."""

    page_size: int
    clock: int  # logical time: one tick per match, publish and release
    level: float  # what rules with the capability `ageing` evicted last
    evictable: int  # tokens of nodes that no lease ends at or below
    protected: int  # and of the others

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, parents first: for what may walk everything."""

    def split(self, node: Any, at: int) -> Any:
        """Cut a node after `at` tokens, whole pages; the lower half stays `node`. Calls `split` of all components."""


class Order(Protocol):
    """An order of eviction by the configured rule: of runs, or of nodes. O(log n) amortised."""

    def offer(self, item: Any) -> None:
        """It became a candidate, or is one that was used."""

    def pop(self) -> Any:
        """The next to go, None if nothing may. What is in use is passed over, and must be offered again after."""

    def clear(self) -> None:
        """Forget everything."""

    def check(self, candidates: int) -> None:
        """Raise AssertionError unless so many candidates are well placed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a component stands: `context.extras["place"]` of its constructor."""

    tree: TreeView
    index: int  # of its entry in `node.states`
    group: PoolGroup
    order: Callable[[], Order]  # makes one


class Run:
    """The slots of one group at one node. Eviction rules see it as EvictionNode, with a recency of its own: a use is a
    match or the end of a request that needs it. What has never been used so, such as the window in the middle of a long
    prompt, has `last_access` 0: else it would push out the ends of older conversations.

    `locks` counts the leases that need it. They need all of it or nothing: nodes are split where what a lease needs
    begins. `slots` is None once it has left the tree.
    """

    __slots__ = ("entry", "last_access", "level", "locks", "node", "slots")

    def __init__(self, node: TreeNode, slots: IntArray) -> None:
        self.node = node
        self.slots: IntArray | None = slots
        self.locks = 0
        self.last_access, self.level = 0, 0.0
        self.entry: Any = None

    @property
    def is_candidate(self) -> bool:
        """True if it may be evicted."""
        return self.slots is not None and not self.locks

    @property
    def tokens(self) -> int:
        """Its slots; this and what follows is the node's."""
        return self.node.tokens

    @property
    def end(self) -> int:
        return self.node.end

    @property
    def created(self) -> int:
        return self.node.created

    @property
    def hits(self) -> int:
        return self.node.hits

    @property
    def priority(self) -> int:
        return self.node.priority


class Component:
    """Kind `component`. One state group of one tree: its entry at every node, its pool, its order of eviction.

    As it stands an entry is a `Run`, or None where its slots are gone (a tombstone). Who goes on from a prefix of `end`
    tokens needs the state of its tokens from `low(end)` on: a match ends only where all of these have slots, and a
    lease protects them, to the page. Any run that no lease needs may be evicted, whatever lies below it: the node
    stays, until somebody who has computed its tokens again publishes them.

    Called by the cache only, on the loop's thread, a few times per request. Slots that leave the tree are gathered
    and go back to the pool together, by `flush`: a rule that raises in the middle of an eviction costs none.
    """

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset({"window"})  # kinds of groups that it can serve
    requires: ClassVar[tuple[str, ...]] = ("cache:components",)

    # Matches may end early for want of its state: it has tombstones. Where it is False the tree's own locks protect the
    # whole path of a lease, and `reach`, `ends`, `lock`, `unlock` and `narrow` are not called.
    bounds: ClassVar[bool] = True
    divisible: ClassVar[bool] = True  # slots are tokens': a node may lose some of them
    run: ClassVar[type[Run]] = Run

    class Options(BaseModel):
        """This component has no options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Any, context: PluginContext) -> None:
        place: Place = context.extras["place"]
        self.tree, self.index, self.group = place.tree, place.index, place.group
        self.pool: SlotPool = context.pools[0]
        self.order = place.order()
        self.freed = 0  # slots that `flush` will return
        self._freed: list[IntArray] = []
        self._evictable = self._protected = 0

    # --- what a match may use, and what a lease protects

    def low(self, end: int) -> int:
        """First token whose state somebody needs who goes on from a prefix of `end` tokens; `end` if none.

        Grows with `end`: what is not needed any more never is again.
        """
        return 0 if self.group.window is None else max(0, end - self.group.window + 1)

    def reach(self, bottom: TreeNode, end: int) -> int:
        """The longest prefix of at most `end` tokens, on the path to `bottom`, that this group can go on from.

        `bottom` holds the last of the `end` tokens. O(nodes looked at).
        """
        at, low, index = bottom, self.low(end), self.index
        while low < end and at.end > low and at.parent is not None:
            if at.states[index] is None:
                end = at.start
                low = self.low(end)
            at = at.parent
        return end

    def ends(self, node: TreeNode) -> bool:
        """Whether a match can end within this node. A leaf where none can is of no use, and leaves the tree."""
        return node.states[self.index] is not None or self.low(node.end) >= node.end

    def lock(self, node: TreeNode) -> int:
        """Protect what a lease that ends at `node` needs, as far as it is there; returns where that begins."""
        low = self.page_low(node)
        for at in self.path(node, low):
            if at.states[self.index] is None:
                return at.end
            self.hold(at.states[self.index])
        return low

    def unlock(self, node: TreeNode, low: int, now: int | None) -> None:
        """Undo a `lock` that began at `low`; `now` where a request ends here, None where it goes on elsewhere."""
        for at in self.path(node, low):
            self.let_go(at.states[self.index], now)

    def narrow(self, node: TreeNode, low: int, start: int) -> int:
        """Unlock what lies before `start`, page-floored, of a lock that began at `low`; returns where it begins now.

        See `Narrows.narrow`.
        """
        start = min(start // self.tree.page_size * self.tree.page_size, node.end)
        if start <= low:
            return low
        below = node
        for at in self.path(node, start):
            below = cast("TreeNode", at.parent)
        self.unlock(below, low, None)
        return start

    def gather(self, node: TreeNode, low: int, start: int) -> IntArray:
        """Slots of the tokens from `start` to the end of `node`, new; -1 for those before `low`. Node boundaries."""
        slots: IntArray = np.full(node.end - start, -1, dtype=np.int32)
        for at in self.path(node, max(low, start)):
            slots[at.start - start : at.end - start] = at.states[self.index].slots
        return slots

    def touch(self, node: TreeNode, now: int) -> None:
        """A match ended at `node`: what it needs is used, and only that. The nodes' own recency is fresh already."""
        for at in self.path(node, self.page_low(node)):
            if at.states[self.index] is not None:
                self.use(at.states[self.index], now)

    # --- what comes and goes

    def fill(self, node: TreeNode, slots: IntArray) -> None:
        """The state of a new node; `slots` are the publisher's, all -1 where it had none any more."""
        if slots[0] >= 0:
            self.add(node, slots)

    def merge(self, nodes: Sequence[TreeNode], slots: IntArray) -> bool:
        """Somebody published what is in the tree: `slots` of the consecutive `nodes`. True if a match may grow.

        Tombstones are healed where the publisher has slots; its copies of the rest are not needed.
        """
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

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` held the state of both; `upper` has none yet, and is its parent. Who needs it needs both halves."""
        run: Run | None = lower.states[self.index]
        if run is None or run.slots is None:
            return
        at, slots = upper.tokens, run.slots
        upper.states[self.index] = head = self.run(upper, slots[:at].copy())
        run.slots = slots[at:].copy()
        head.locks, head.last_access, head.level = run.locks, run.last_access, run.level
        if not run.locks:
            self.order.offer(head)
            self.order.offer(run)

    def drop(self, node: TreeNode) -> None:
        """The node leaves the tree."""
        if node.states[self.index] is not None:
            self.bury(node)

    # --- runs

    def page_low(self, node: TreeNode) -> int:
        """`low` of a node's end, page-floored."""
        return self.low(node.end) // self.tree.page_size * self.tree.page_size

    def path(self, node: TreeNode, low: int) -> Iterator[TreeNode]:
        """The nodes that hold the tokens from `low`, page-aligned, to the end of `node`, from there up.

        Where a run reaches beyond that its node is split.
        """
        while node.end > low:
            if node.start < low and node.states[self.index] is not None:
                self.tree.split(node, low - node.start)
            yield node
            assert node.parent is not None, "a path that begins before its root"
            node = node.parent

    def add(self, node: TreeNode, slots: IntArray) -> Run:
        """A run where there was none, not yet used; `slots` are copied."""
        run = node.states[self.index] = self.run(node, slots.copy())
        self._evictable += run.tokens
        self.order.offer(run)
        return run

    def hold(self, run: Run) -> None:
        """One more lease needs it."""
        if not run.locks:
            self._evictable -= run.tokens
            self._protected += run.tokens
        run.locks += 1

    def let_go(self, run: Run, now: int | None) -> None:
        """One lease fewer needs it; with `now` it was in use until now."""
        run.locks -= 1
        if not run.locks:
            self._evictable += run.tokens
            self._protected -= run.tokens
            if now is not None:
                run.last_access, run.level = now, self.tree.level
            self.order.offer(run)

    def use(self, run: Run, now: int) -> None:
        """A match needs it."""
        run.last_access, run.level = now, self.tree.level
        if not run.locks:
            self.order.offer(run)

    # --- eviction

    def ready(self, node: TreeNode) -> None:
        """The node is an unlocked leaf now."""

    def pop(self) -> TreeNode | None:
        """The node whose state goes next, out of the order of eviction; None if nothing may."""
        run: Run | None = self.order.pop()
        return None if run is None else run.node

    def bury(self, node: TreeNode) -> None:
        """Free the state of a node, which stays in the tree as a tombstone."""
        run: Run = node.states[self.index]
        assert run.slots is not None, "a run that has left the tree already"
        assert not run.locks, "a run that is needed cannot go"
        self._evictable -= run.tokens
        self.free(run.slots)
        run.slots = node.states[self.index] = None

    def clear(self) -> None:
        """All that no lease protects is about to go."""
        self.order.clear()
        for node in self.tree.nodes():
            run: Run | None = node.states[self.index]
            if run is not None and not run.locks:
                self.bury(node)

    def counts(self) -> CacheCounts:
        """Slots that may be evicted, and slots that leases protect. O(1)."""
        return CacheCounts(self._evictable, self._protected)

    # --- for `check()`

    def slots(self, node: TreeNode) -> IntArray | None:
        """The slots at a node."""
        run: Run | None = node.states[self.index]
        return None if run is None else run.slots

    def check(self, ends: Sequence[tuple[TreeNode, int]]) -> None:
        """Recount everything; `ends` are (node, low) of all leases. Raises AssertionError."""
        nodes = len(list(self.tree.nodes()))
        needed = Counter(id(at) for node, low in ends for at in self.path(node, low))
        assert nodes == len(list(self.tree.nodes())), "a node that a lease needs in part"
        self.check_runs(needed)

    def check_runs(self, needed: Counter[int]) -> None:
        """Locks against leases (`needed`, by the node's id), counts against runs, the order against both."""
        live: list[Run] = [run for node in self.tree.nodes() if (run := node.states[self.index]) is not None]
        for run in live:
            assert run.slots is not None, "a run in the tree without slots"
            assert run.node.states[self.index] is run, "a run at another node than its own"
            locks = needed.pop(id(run.node), 0)
            assert run.locks == locks, f"{run.locks} locks at a run that {locks} leases need"
        assert not needed, "a lease needs a run that is gone"
        evictable = sum(run.tokens for run in live if not run.locks)
        actual = CacheCounts(evictable, sum(run.tokens for run in live) - evictable)
        assert self.counts() == actual, f"counted {self.counts()}, there are {actual}"
        self.order.check(sum(run.is_candidate for run in live))

    # --- slots that leave the tree

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
