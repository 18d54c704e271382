"""First come, first served."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext

from ._ranked import RankedPolicy


class FcfsOptions(BaseModel):
    """`schedule: {use: fcfs}` has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fcfs(RankedPolicy):
    """Arrival order; a retracted request keeps its place."""

    api = 1
    Options = FcfsOptions
    max_overtakes = 512  # while a request waits for another one's prefix; the order itself has none

    def __init__(self, options: FcfsOptions, context: PluginContext) -> None:
        super().__init__(lambda request: request.arrival)
