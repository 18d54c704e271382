"""The cost-aware eviction rule: least time to recompute per byte first, with ageing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import EvictionNode, PluginContext


class Cost:
    """Keeps what is used often and costs much to compute again, and lets everything go in the end.

    GreedyDual-Size-Frequency: key = level at the last use + uses * cost / bytes, where the level is the largest key
    evicted so far (Young, "The k-server dual and loose competitiveness for paging", 1994; Cao and Irani, "Cost-aware
    WWW proxy caching algorithms", 1997; Cherkasova, HPL-98-69R1, 1998). All tokens take the same bytes, and a token
    deep in a text costs more, since it attends to all before it: a first token costs 1, the one at `doubles_at` 2.
    """

    api = 1
    capabilities: frozenset[str] = frozenset({"ageing"})

    class Options(BaseModel):
        """Options of `cache: {eviction: {use: cost}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        doubles_at: int = Field(default=8192, ge=1)
        """Depth at which a token takes twice the time of the first: parameters / (2 * layers * heads * head size)."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._doubles_at = options.doubles_at

    def key(self, node: EvictionNode) -> float:
        """Level at the last use, plus uses times the cost of the run's middle token."""
        depth = node.end - node.tokens / 2
        return node.level + (1 + node.hits) * (1 + depth / self._doubles_at)
