"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.request import Request


class FcfsOptions(BaseModel):
    """`schedule: {use: fcfs}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fcfs:
    """Arrival order; a retracted request keeps its place."""

    api = 1
    Options = FcfsOptions
    capabilities: frozenset[str] = frozenset()

    def __init__(self, options: FcfsOptions, context: PluginContext) -> None:
        pass

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Earliest arrival first."""
        return sorted(waiting, key=lambda r: r.arrival)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The core's choice: the latest arrival."""
        return None
