"""Tells the tiers below of blocks that are about to leave the tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phloem.components import Component
from phloem.storage import Leaving

from ._tree import Node, Tree


class Spill:
    """One taker of whole blocks of `block` tokens."""

    def __init__(self, taker: Leaving, block: int, components: Sequence[Component]) -> None:
        self._taker, self._block, self._components = taker, block, components

    def leaves(self, node: Node) -> None:
        """Some of a node's state is about to leave, and with it the whole blocks that it has part in."""
        if node.end // self._block == node.start // self._block:
            return
        base, path = node.start // self._block * self._block, [node]
        while path[-1].start > base and (parent := path[-1].parent) is not None:
            path.append(parent)
        slots = []
        for part in self._components:
            held = [(part.slots(at), at.tokens) for at in reversed(path)]
            whole = np.concatenate([np.full(size, -1, np.int32) if own is None else own for own, size in held])
            slots.append(whole[len(whole) - (node.end - base) :])
        self._taker(node.root.namespace, Tree.text(node), node.start, base, slots)
