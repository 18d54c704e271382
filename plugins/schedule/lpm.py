"""Longest prefix match first, with ageing that bounds how often a request may be overtaken (design §7)."""

from __future__ import annotations

from phloem.interfaces import PluginContext

from ._bounded import BoundedOptions, charge
from ._indexed import IndexedPolicy


class LpmOptions(BoundedOptions):
    """Options of `schedule: {use: lpm}`."""


class Lpm(IndexedPolicy):
    """Orders by cached tokens minus a charge linear in arrival, so order keys of waiting requests never drift.

    A later request passes an earlier one only if its longer match outweighs the arrivals between them. With a charge
    of context / max_overtakes per arrival, none that came more than `max_overtakes` later can. After the policy of
    RadixAttention (Zheng et al., arXiv 2312.07104), with ageing, and at any length of the queue.
    """

    api = 1
    Options = LpmOptions

    def __init__(self, options: LpmOptions, context: PluginContext) -> None:
        each = charge(options, context)
        self.max_overtakes = options.max_overtakes
        super().__init__(context.page_size, lambda request: request.arrival * each)
