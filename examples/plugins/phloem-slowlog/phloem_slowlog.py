"""Observer: writes a line for every request or step that takes longer than it should."""

from __future__ import annotations

import logging

from pydantic import BaseModel, ConfigDict, Field

from phloem.batch import StepStats
from phloem.hooks import RequestSummary, hookimpl
from phloem.interfaces import PluginContext

log = logging.getLogger("phloem.slowlog")


class Slowlog:
    """Logs slow requests and slow steps, and at the end how many there were."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `observers: [{use: slowlog}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        first_token_s: float = Field(default=2.0, ge=0)
        """A request whose first token took longer than this is slow."""
        step_s: float = Field(default=1.0, ge=0)
        """A step that took longer than this is slow."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._options = options
        self._requests = self._steps = 0

    @hookimpl
    def step(self, stats: StepStats) -> None:
        """Called after each step, on the loop's thread."""
        took = stats.host_s + stats.forward_s + stats.sample_s
        if took > self._options.step_s:
            self._steps += 1
            log.warning("step %d took %.2f s for %d tokens", stats.step, took, stats.forward_tokens)

    @hookimpl
    def request(self, summary: RequestSummary) -> None:
        """Called once per finished choice."""
        first = summary.queue_to_first_token_s
        if first is not None and first > self._options.first_token_s:
            self._requests += 1
            log.warning("request %s waited %.2f s for its first token", summary.id, first)

    @hookimpl
    def stop(self) -> None:
        """Called once, after the last step; arguments that a hook does not need may be left out."""
        log.info("%d slow requests, %d slow steps", self._requests, self._steps)
