"""Least prompt left to compute first, with ageing that bounds how often a request may be overtaken."""

from __future__ import annotations

from phloem.interfaces import PluginContext

from ._bounded import BoundedOptions, charge
from ._indexed import IndexedPolicy


class ShortestPrefillOptions(BoundedOptions):
    """Options of `schedule: {use: shortest-prefill}`."""


class ShortestPrefill(IndexedPolicy):
    """Orders by tokens of the text that are not cached, plus a charge linear in arrival: as `lpm`, by what is missing.

    Shortest job first (of the prefill) for mixed loads: short prompts do not stand behind long documents.
    """

    api = 1
    Options = ShortestPrefillOptions

    def __init__(self, options: ShortestPrefillOptions, context: PluginContext) -> None:
        each = charge(options, context)
        self.max_overtakes = options.max_overtakes
        super().__init__(context.page_size, lambda request: request.arrival * each + len(request.tokens))
