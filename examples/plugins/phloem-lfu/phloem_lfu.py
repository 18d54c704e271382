"""Eviction rule: the cached prefix that was used least often goes first."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import EvictionNode, PluginContext


class Lfu:
    """Fewest uses first, at equal uses the least recently used; uses count up to a limit, so fame fades."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `cache: {eviction: {use: lfu}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        most: int = Field(default=16, ge=1)
        """Uses beyond this many count no more: among popular prefixes recency decides."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._most = options.most

    def key(self, node: EvictionNode) -> tuple[int, int, int]:
        """Smallest first. A higher priority keeps a node longer, whatever its use."""
        return node.priority, min(node.hits, self._most), node.last_access
