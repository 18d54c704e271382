"""The waiting requests as a radix trie over their own prompts, which knows how much of every run is cached.

Structure only: what is best below a node, and in which order requests go, is `_index`'s business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from phloem.prefix import PageKey, common_prefix, page_key
from phloem.request import Namespace, Request

Rank = tuple[float, int]  # what a request has by itself, and its arrival; the smallest goes first


class Node:
    """A run of tokens that waiting requests have in common; `covered` of them, from the run's start, are cached.

    What is cached is a path from the root, so a node is covered only below nodes that are covered wholly. A request
    hangs at the node where the reusable part of its prompt ends.
    """

    __slots__ = ("best", "children", "count", "covered", "heap", "key", "lit", "own", "parent", "start")

    def __init__(self, parent: Node | None, key: array[int], start: int) -> None:
        self.parent = parent  # None for a root and for a node that was taken out
        self.key = key
        self.start = start  # tokens before the run
        self.covered = 0
        self.children: dict[PageKey, Node] = {}
        self.lit: dict[Node, None] = {}  # the children that are covered; a dict, since its order is reproducible
        self.own = 0  # requests that hang here
        self.count = 0  # requests that hang here or below, those set aside left out
        self.best: Rank | None = None  # of the requests whose match ends with this node's `covered`
        self.heap: list[tuple[Rank, int, Node | Request]] = []  # lazy: `_index` judges an entry when it is on top

    @property
    def end(self) -> int:
        """Tokens up to the run's end."""
        return self.start + len(self.key)

    @property
    def depth(self) -> int:
        """Cached tokens of the requests that the cache leaves here."""
        return self.start + self.covered


class Root(Node):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, array("i"), 0)
        self.namespace = namespace


class Trie:
    """Page-granular and compressed: apart from the roots, a node with one child has requests of its own."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[Namespace, Root] = {}

    def walk(self, namespace: Namespace, tokens: array[int]) -> Iterator[tuple[Node, int]]:
        """The nodes along `tokens`, each with how many tokens of its run agree; only the last may do so in part."""
        node: Node | None = self.roots.get(namespace)
        page = self.page_size
        end = len(tokens) - page  # where the last whole page starts
        while node is not None and node.end <= end:
            at = node.end
            node = node.children.get(page_key(tokens, at, page))
            if node is not None:
                key, size = node.key, len(node.key)
                same = size
                if tokens[at : at + size] != key:  # one compare in C, which most often is all
                    same = common_prefix(key, tokens, at, min(size, len(tokens) - at)) // page * page
                yield node, same
                if same < size:
                    return

    def grow(self, parent: Node, key: array[int], matched: int) -> Node:
        """A new leaf; of its prompt `matched` tokens are cached."""
        child = Node(parent, key, parent.end)
        parent.children[page_key(key, 0, self.page_size)] = child
        if parent.covered == len(parent.key):
            child.covered = min(max(matched - child.start, 0), len(key))
        if child.covered:
            parent.lit[child] = None
        return child

    def split(self, node: Node, at: int) -> Node:
        """Cut a run after `at` tokens; returns the new upper half, at which nothing hangs. The lower stays itself."""
        parent, key, page = node.parent, node.key, self.page_size
        assert parent is not None, "a root has no run"
        upper = Node(parent, key[:at], node.start)
        parent.children[page_key(key, 0, page)] = upper
        upper.children[page_key(key, at, page)] = node
        upper.count = node.count
        upper.covered = min(node.covered, at)
        if node.covered:
            del parent.lit[node]
            parent.lit[upper] = None
        node.parent, node.key, node.start = upper, key[at:], node.start + at
        node.covered -= upper.covered
        if node.covered:
            upper.lit[node] = None
        return upper

    def merge(self, node: Node) -> Node:
        """Join a node at which nothing hangs with its only child, which is returned and stays itself."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None, "a root is not merged"
        parent.children[page_key(node.key, 0, self.page_size)] = child
        child.parent, child.key, child.start = parent, node.key + child.key, node.start
        child.covered += node.covered
        if parent.lit.pop(node, node) is None:
            parent.lit[child] = None
        node.parent = None
        return child

    def cut(self, leaf: Node) -> Node:
        """Take out a leaf at which nothing hangs; returns its parent."""
        parent = leaf.parent
        assert parent is not None, "a root is not cut"
        del parent.children[page_key(leaf.key, 0, self.page_size)]
        parent.lit.pop(leaf, None)
        leaf.parent = None
        return parent
