"""The radix tree over tokens: nodes, walking, splitting, locks, and the tokens that locks protect.

It knows pages and namespaces but no state: what a node's tokens have computed hangs on the node, one entry of `states`
per state group, and is the business of that group's component.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

from phloem.components import Component
from phloem.prefix import PageKey, common_prefix, page_key
from phloem.request import Namespace

_UNUSED = -(2**63)  # priority before any request has told its own


class Node:
    """A run of tokens; the runs from the root to here are one cached prefix. Eviction rules see it as EvictionNode.

    `locks` counts the leases that end here plus the children that are locked, so a node is locked exactly if a lease
    ends at or below it, and locking stops at the first ancestor that was locked already. `states[i]` is component i's:
    None where it has nothing for these tokens (a tombstone); a root has none at all.
    """

    __slots__ = (
        "children",
        "created",
        "end",
        "entry",
        "hits",
        "key",
        "last_access",
        "level",
        "locks",
        "parent",
        "priority",
        "root",
        "states",
    )

    def __init__(self, parent: Node | None, key: array[int], now: int) -> None:
        self.parent = parent  # None for a root and for a node that was removed
        self.root: Root = parent.root if parent is not None else cast("Root", self)
        self.children: dict[PageKey, Node] = {}
        self.key = key
        self.states: list[Any] = []
        self.end: int = len(key) if parent is None else parent.end + len(key)  # length of the prefix that ends here
        self.locks = 0
        self.created = now
        self.last_access = now
        self.hits = 0
        self.priority = _UNUSED
        self.level = 0.0
        self.entry: Any = None  # this node's live entry in the eviction heap

    @property
    def tokens(self) -> int:
        """Tokens of this run."""
        return len(self.key)

    @property
    def start(self) -> int:
        """Length of the prefix before this run."""
        return self.end - len(self.key)

    @property
    def is_candidate(self) -> bool:
        """True if it may be evicted: nothing below it, no lease at it, and it is in the tree."""
        return not self.children and not self.locks and self.parent is not None


class Root(Node):
    """The empty prefix of one namespace. Namespaces share no node."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, now: int) -> None:
        super().__init__(None, array("i"), now)
        self.namespace = namespace


class Tree:
    """One radix tree per namespace over page-aligned keys. Node boundaries are page boundaries.

    `evictable` and `protected` are the tokens of unlocked and locked nodes.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[Namespace, Root] = {}
        self.evictable = 0
        self.protected = 0
        self.clock = 0  # logical time: one tick per match, publish and release
        self.components: Sequence[Component] = ()
        self.level = 0.0  # what rules with the capability `ageing` evicted last: the heap raises it

    def tick(self) -> int:
        """The next logical time."""
        self.clock += 1
        return self.clock

    def walk(self, node: Node, tokens: array[int], end: int) -> tuple[Node, Node | None, int]:
        """Follow tokens[node.end : end] down from `node`, which ends a prefix of `tokens`. Changes nothing.

        `end` is a multiple of the page size. Returns the last node wholly matched, and the child that matched only in
        part with the (page-floored) number of its tokens that did; None and 0 if there is no such child.
        """
        page = self.page_size
        at = node.end
        while at < end:
            child = node.children.get(tokens[at] if page == 1 else page_key(tokens, at, page))
            if child is None:
                break
            key, left = child.key, end - at
            size = len(key)
            same = common_prefix(key, tokens, at, size if size < left else left)
            if same < size:
                return node, child, same // page * page
            node = child
            at += size
        return node, None, 0

    def attach(self, parent: Node, key: array[int], now: int) -> Node:
        """A new unlocked leaf below `parent`, which has no child that starts with the same page; components fill it."""
        node = Node(parent, key, now)
        node.states = [None] * len(self.components)
        node.level = self.level
        parent.children[page_key(key, 0, self.page_size)] = node
        self.evictable += len(key)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` tokens; returns the new upper half. No count changes.

        The lower half stays the same object, so that leases and matches that end at the node still end there. None
        ends at the upper half yet: it is locked once if its only child is.
        """
        parent, key = node.parent, node.key
        assert parent is not None, "a root or a removed node cannot be split"
        assert 0 < at < len(key), f"no split of {len(key)} tokens at {at}"
        parent.children[page_key(key, 0, self.page_size)] = upper = Node(parent, key[:at], node.created)
        upper.children[page_key(key, at, self.page_size)] = node
        upper.locks = 1 if node.locks else 0
        upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
        upper.level = node.level
        node.parent, node.key = upper, key[at:]
        upper.states = [None] * len(self.components)
        for component in self.components:
            component.split(upper, node)
        return upper

    def remove(self, node: Node) -> Node:
        """Take an evictable leaf out of the tree; returns its parent, and forgets a root that is left unused."""
        parent = node.parent
        assert parent is not None, "a root or a removed node cannot be removed"
        assert node.is_candidate, "a node in use cannot be removed"
        del parent.children[page_key(node.key, 0, self.page_size)]
        node.parent = None
        self.evictable -= len(node.key)
        self.prune(parent.root)
        return parent

    def prune(self, root: Root) -> None:
        """Forget a namespace that holds nothing and that nobody leases."""
        if not root.children and not root.locks and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    def lock(self, node: Node) -> None:
        """One more lease ends at `node`: its path becomes protected. O(nodes that were unlocked)."""
        at: Node | None = node
        while at is not None:
            at.locks += 1
            if at.locks > 1:
                break
            at = at.parent
        moved = node.end if at is None else node.end - at.end
        self.evictable -= moved
        self.protected += moved

    def unlock(self, node: Node, now: int) -> None:
        """One lease fewer ends at `node`. What becomes evictable was in use until now, and its recency says so."""
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if at.locks:
                break
            at.last_access, at.level = now, self.level
            at = at.parent
        moved = node.end if at is None else node.end - at.end
        self.evictable += moved
        self.protected -= moved

    def touch(self, node: Node, now: int) -> None:
        """Refresh the recency of the path that ends at `node`. No use yet: whoever waits looks again and again."""
        at: Node | None = node
        while at is not None:
            at.last_access, at.level = now, self.level
            at = at.parent

    def used(self, node: Node, found: int, priority: int) -> None:
        """A request of this priority used the path to `node`, of which it had found the first `found` tokens here.

        On every path hits and priorities fall from the root down: O(nodes found), plus those whose priority rises.
        """
        at: Node | None = node
        while at is not None and at.priority < priority:
            at.priority = priority
            at = at.parent
        at = node
        while at is not None and at.end > found:
            at = at.parent
        while at is not None:
            at.hits += 1
            at = at.parent

    @staticmethod
    def text(node: Node) -> array[int]:
        """All tokens of the prefix that ends at `node`. O(their number)."""
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.key)
            at = at.parent
        tokens = array(node.key.typecode)
        for part in reversed(parts[:-1]):  # all but the root's, which has none
            tokens += part
        return tokens

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)
