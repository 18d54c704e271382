"""Longest output first, with ageing that bounds how often a request may be overtaken."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext

from ._ranked import RankedPolicy


class LofOptions(BaseModel):
    """Options of `schedule: {use: lof}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_overtakes: int = Field(default=512, ge=1)
    """No request is overtaken by more than this many later ones."""


class Lof(RankedPolicy):
    """Orders by the most tokens that may still be written, minus a charge linear in arrival.

    For batch jobs: what takes longest starts first, so that the end of the job is not one long request alone. A call
    without `max_tokens` counts with all that context and pool allow.
    """

    api = 1
    Options = LofOptions

    def __init__(self, options: LofOptions, context: PluginContext) -> None:
        longest = context.model.context_length if context.model else 1 << 20
        charge = longest / options.max_overtakes
        self.max_overtakes = options.max_overtakes
        super().__init__(lambda request: request.arrival * charge - request.remaining)
