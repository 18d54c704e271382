"""Eviction rules that order by use, age or priority: which unlocked leaf goes first. All keys are O(1)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import EvictionNode, PluginContext


class _NoOptions(BaseModel):
    """This rule has no options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Plain:
    """What rules without options share."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()
    Options = _NoOptions

    def __init__(self, options: _NoOptions, context: PluginContext) -> None:
        pass


class Lru(_Plain):
    """Least recently used first: the leaf whose last match, or whose last lease's end, lies furthest back.

    Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", 1970; over the leaves of a
    radix tree in RadixAttention (arXiv 2312.07104).
    """

    def key(self, node: EvictionNode) -> int:
        """Logical time of last use."""
        return node.last_access


class Mru(_Plain):
    """Most recently used first: right where texts are asked in turn and all of them do not fit.

    Chou and DeWitt, "An evaluation of buffer management strategies for relational database systems", 1985.
    """

    def key(self, node: EvictionNode) -> int:
        """Logical time of last use, backwards."""
        return -node.last_access


class Fifo(_Plain):
    """First in, first out, used or not. Belady, "A study of replacement algorithms", 1966."""

    def key(self, node: EvictionNode) -> int:
        """Logical time at which the run was published."""
        return node.created


class Filo(_Plain):
    """First in, last out: what came first stays, as in SGLang's strategy of that name."""

    def key(self, node: EvictionNode) -> int:
        """Logical time at which the run was published, backwards."""
        return -node.created


class Priority(_Plain):
    """Lowest priority first, the highest of the requests that used a run; least recently used among equals.

    As in SGLang and TensorRT-LLM. Needs a schedule policy that takes priorities, else all were 0. Nothing fades: a
    prefix of high priority goes when only such are left.
    """

    requires = ("schedule:priority",)

    def key(self, node: EvictionNode) -> tuple[int, int]:
        """Priority, then recency."""
        return node.priority, node.last_access


class Lfu:
    """Least frequently used first; least recently used among equals.

    Best where requests are independent draws: Aho, Denning and Ullman, "Principles of optimal page replacement", 1971.
    """

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `cache: {eviction: {use: lfu}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        most: int = Field(default=64, ge=1)
        """Uses beyond this many do not count: what was popular once need not stay for ever."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._most = options.most

    def key(self, node: EvictionNode) -> tuple[int, int]:
        """Uses, then recency."""
        return min(node.hits, self._most), node.last_access


class Slru:
    """Segmented LRU: what was never used again goes before what was, least recently used first in both segments.

    A scan of one-off prompts then cannot push out what requests share. After Karedla, Love and Wherry, "Caching
    strategies to improve disk system performance", 1994; where they bound the protected segment's size, here its
    members count as used `grace` ticks later than they were, so that they fade too.
    """

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `cache: {eviction: {use: slru}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        hits: int = Field(default=1, ge=1)
        """Uses that put a run into the protected segment."""
        grace: int = Field(default=10_000, ge=0)
        """Ticks of the cache's clock that a protected run stays longer; a request takes about four."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._hits, self._grace = options.hits, options.grace

    def key(self, node: EvictionNode) -> int:
        """Logical time of last use, later for the protected."""
        return node.last_access + (self._grace if node.hits >= self._hits else 0)
