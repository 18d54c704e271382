"""What tiers see of the tree: all that hangs on a path, and which whole blocks are about to lose state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phloem.batch import IntArray
from phloem.components import Component
from phloem.storage import Leaving

from ._tree import Node, Tree


class Spill:
    """Of one cache. The `taker`, if there is one, is told of blocks of `block` tokens."""

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components
        self.taker: Leaving | None = None
        self.block = 1

    def kept(self, node: Node, base: int = 0) -> tuple[IntArray, ...]:
        """Per component the slots of tokens [base, node.end), see `Spills.kept`."""
        made = []
        for part in self._components:
            whole: IntArray = np.full(node.end - base, -1, dtype=np.int32)
            at = node
            while at.parent is not None and at.end > base:
                own = part.slots(at)
                if own is not None:
                    own = own[max(0, len(own) - (at.end - base)) :]
                    whole[at.end - base - len(own) : at.end - base] = own
                at = at.parent
            made.append(whole)
        return tuple(made)

    def leaves(self, node: Node, *, stays: bool = False) -> None:
        """Some of a node's state is about to leave, and with it the whole blocks that it has part in.

        `stays`: its tokens do not lose their slots.
        """
        if self.taker is None:
            return
        base = self._begin(node) // self.block * self.block
        for bottom, end in self._blocks(node, inside=stays):
            slots = [own[: end - base] for own in self.kept(bottom, base)]
            self.taker(node.root.namespace, Tree.text(bottom)[:end], base, slots)

    def _begin(self, node: Node) -> int:
        """Where that begins which nobody can go on from without this node: where there are states, behind the last."""
        whole = [part.index for part in self._components if not part.divisible]
        while (up := node.parent) is not None and up.parent is not None and any(up.states[i] is None for i in whole):
            node = up
        return node.start

    def _blocks(self, node: Node, *, inside: bool) -> Iterator[tuple[Node, int]]:
        """The ends of prefixes, and the nodes they lie in, of which such blocks are the last.

        A block that goes on below the node goes on in each of its branches; with `inside` none of these matters.
        """
        end, until = node.end // self.block * self.block, -(-node.end // self.block) * self.block
        if end > node.start:
            yield node, end
        below = list(node.children.values()) if end < node.end and not inside else []
        while below:
            at = below.pop()
            if at.end < until:
                below += at.children.values()
            else:
                yield at, until
