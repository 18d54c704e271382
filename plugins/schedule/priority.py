"""Higher priorities first, strictly; a running request gives way to one whose priority is much higher."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext
from phloem.request import Request

from ._ranked import RankedPolicy


class PriorityOptions(BaseModel):
    """Options of `schedule: {use: priority}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preempt_at: int | None = Field(default=10, ge=1)
    """A running request is retracted for a waiting one whose priority is higher by at least this; null: never."""


class Priority(RankedPolicy):
    """Orders by `priority`, the highest first, then by arrival. Nothing ages: low priorities may wait for ever.

    Equals never preempt each other. Who is retracted, to make place or for want of slots, is of the lowest priority
    that runs, and of these the latest; its computed state stays in the cache while there is room.
    """

    api = 1
    Options = PriorityOptions
    capabilities = frozenset({"queue", "priority", "preempts"})

    def __init__(self, options: PriorityOptions, context: PluginContext) -> None:
        self._threshold = options.preempt_at
        super().__init__(lambda request: -request.call.priority)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The latest of the lowest priority."""
        return min(running, key=lambda r: (r.call.priority, -r.arrival), default=None)

    def preempt(self, request: Request, running: Sequence[Request]) -> Request | None:
        """The same, if `request` is so much more important."""
        victim = self.victim(running)
        if victim is None or self._threshold is None:
            return None
        return victim if request.call.priority - victim.call.priority >= self._threshold else None
