"""Longest output first, with ageing that bounds how often a request may be overtaken."""

from __future__ import annotations

from phloem.interfaces import PluginContext

from ._bounded import BoundedOptions, charge
from ._ranked import RankedPolicy


class LofOptions(BoundedOptions):
    """Options of `schedule: {use: lof}`."""


class Lof(RankedPolicy):
    """Orders by the most tokens that may still be written, minus a charge linear in arrival.

    For batch jobs: what takes longest starts first, so that the end of the job is not one long request alone. A call
    without `max_tokens` counts with all that context and pool allow.
    """

    api = 1
    Options = LofOptions

    def __init__(self, options: LofOptions, context: PluginContext) -> None:
        each = charge(options, context)
        self.max_overtakes = options.max_overtakes
        super().__init__(lambda request: request.arrival * each - request.remaining)
