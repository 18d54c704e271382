"""The contract of kind `eviction`: which unused prefix goes first."""

from __future__ import annotations

from typing import Any, Protocol


class Eviction(Protocol):
    """Kind `eviction`. Orders evictable leaves: the smallest key goes first. Called when a node becomes a leaf.

    Capability `ageing` (GreedyDual): keys are numbers, and a node knows the largest that was evicted before its last
    use, `node.level`. A key of level + worth lets every node go in the end, and those of more worth later.
    """

    def key(self, node: EvictionNode) -> Any:
        """Comparable key of a node; evaluated when the node is pushed on the heap and re-checked when popped."""


class EvictionNode(Protocol):
    """What an eviction rule may look at."""

    @property
    def last_access(self) -> int: ...  # logical clock of the last use: a match that passed, a lease that ended
    @property
    def created(self) -> int: ...
    @property
    def hits(self) -> int: ...  # requests that have ended and had found this run here
    @property
    def tokens(self) -> int: ...  # of this run
    @property
    def end(self) -> int: ...  # length of the prefix that ends with it
    @property
    def priority(self) -> int: ...  # the highest of the requests that used it
    @property
    def level(self) -> float: ...  # see Eviction, capability `ageing`
