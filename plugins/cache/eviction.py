"""Eviction rules: which unlocked leaf goes first."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import EvictionNode, PluginContext


class Lru:
    """Least recently used: the leaf whose last match, or whose last lease's end, lies furthest back."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """This rule has no options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def key(self, node: EvictionNode) -> int:
        """Logical time of last use."""
        return node.last_access
