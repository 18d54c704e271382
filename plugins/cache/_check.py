"""Invariants of the tree and its components, recomputed from scratch: for `check()`, in tests after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from phloem.batch import IntArray
from phloem.components import Component
from phloem.prefix import page_key

from ._tree import Node, Tree


def check_cache(tree: Tree, components: Sequence[Component], leases: Sequence[tuple[Node, int, list[int]]]) -> None:
    """Raise AssertionError unless all agrees; `leases` are (node, length, where each component's lock begins)."""
    for node, length, _ in leases:
        assert node.end == length, f"a lease of {length} tokens ends at {node.end}"
    check_tree(tree, [node for node, _, _ in leases])
    for i, part in enumerate(components):
        part.check([(node, lows[i]) for node, _, lows in leases])
        _check_slots(tree, part)
    for node in tree.nodes():
        assert len(node.states) == len(components), "a node without an entry for each component"
        if node.is_candidate:
            assert all(part.ends(node) for part in components), "a leaf that no match can end at"


def _check_slots(tree: Tree, part: Component) -> None:
    """Whole pages, each at one place only, and none of them free."""
    page, owned = part.pool.page_size, []
    for node in tree.nodes():
        slots = part.slots(node)
        if slots is not None:
            if part.divisible:
                _check_pages(slots, node.tokens, page)
            owned += slots[::page].tolist()
    assert len(set(owned)) == len(owned), "a page lies at two places of the tree"
    free = part.pool.free_set()
    assert len(free) * page == part.pool.free, "a page is free twice"
    assert free.isdisjoint(slot // page for slot in owned), "a page of the tree is also free"
    assert not part.freed, "slots left the tree and were not given back"


def _check_pages(slots: IntArray, tokens: int, page_size: int) -> None:
    assert len(slots) == tokens, f"{len(slots)} slots for {tokens} tokens"
    pages = slots.reshape(-1, page_size)
    whole = (pages[:, :1] % page_size == 0).all() and (pages == pages[:, :1] + np.arange(page_size)).all()
    assert whole, "slots of a node that are not whole pages"


def check_tree(tree: Tree, leases: Iterable[Node]) -> None:
    """Raise AssertionError unless links, keys, locks and counts agree; `leases` are the nodes at which leases end."""
    ends = Counter(map(id, leases))
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace, f"the root of {root.namespace} is filed under {namespace}"
        assert root.children or root.locks, f"the empty root of {namespace} was not forgotten"
        assert root.parent is None, "a root with a parent"
        assert root.end == 0, "a root that is not the empty prefix"
        _check_locks(root, ends)
    evictable = protected = 0
    for node in tree.nodes():
        _check_links(node, tree.page_size)
        _check_locks(node, ends)
        if node.locks:
            protected += node.tokens
        else:
            evictable += node.tokens
    assert not ends, f"{ends.total()} leases end at nodes that are not in the tree"
    counted, actual = (tree.evictable, tree.protected), (evictable, protected)
    assert counted == actual, f"evictable and protected are counted as {counted} and are {actual}"


def _check_links(node: Node, page_size: int) -> None:
    parent = node.parent
    assert parent is not None, "a node in the tree without a parent"
    assert node.root is parent.root, "a node and its parent belong to different roots"
    assert parent.children.get(page_key(node.key, 0, page_size)) is node, "a node is filed under another page"
    assert node.tokens, "an empty node"
    assert node.tokens % page_size == 0, f"a node of {node.tokens} tokens at page size {page_size}"
    fallen = parent.parent is None or (parent.hits >= node.hits and parent.priority >= node.priority)
    assert fallen, "a node was used more, or by a higher priority, than its parent"
    assert node.end == parent.end + node.tokens, f"a node that ends at {node.end} after a parent at {parent.end}"


def _check_locks(node: Node, ends: Counter[int]) -> None:
    expected = ends.pop(id(node), 0) + sum(child.locks > 0 for child in node.children.values())
    assert node.locks == expected, f"{node.locks} locks at a node that ends {expected} leases and locked children"
