"""Schedule policy: the request with the least prompt left to compute goes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext
from phloem.request import Request


class ShortFirst:
    """Least uncached prompt first, with a charge per arrival so that long prompts are not starved."""

    api = 1
    capabilities = frozenset({"matched"})  # the core keeps `request.matched`, the cached tokens, fresh

    class Options(BaseModel):
        """Options of `schedule: {use: short-first}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        patience: int = Field(default=200, ge=1)
        """No request is overtaken by more later ones than this."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        longest = context.model.context_length if context.model else 1 << 20
        self._charge = longest / options.patience

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Keys depend on the request alone, so the order of two requests changes only when the cache does."""
        return sorted(waiting, key=lambda r: r.prompt_len - r.matched + r.arrival * self._charge)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """When slots run out, the request that has most of its output still to write."""
        return max(running, key=lambda r: (r.remaining, r.arrival), default=None)
