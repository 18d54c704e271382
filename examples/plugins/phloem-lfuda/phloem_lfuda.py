"""Eviction rule: the cached prefix that was used least often goes first, and fame fades (LFU with dynamic ageing)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import EvictionNode, PluginContext


class Lfuda:
    """LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques", 2000.

    What was popular long ago has a low level, so that new prefixes pass it, the sooner the more is evicted.
    """

    api = 1
    capabilities: frozenset[str] = frozenset({"ageing"})

    class Options(BaseModel):
        """Options of `cache: {eviction: {use: lfuda}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
        """What one use counts; larger values let popular prefixes stay longer."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._weight = options.weight

    def key(self, node: EvictionNode) -> float:
        """Smallest first: the level at the last use, and the uses."""
        return node.level + self._weight * (1 + node.hits)
