"""Least prompt left to compute first, with ageing that bounds how often a request may be overtaken."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext

from ._indexed import IndexedPolicy


class ShortestPrefillOptions(BaseModel):
    """Options of `schedule: {use: shortest-prefill}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_overtakes: int = Field(default=512, ge=1)
    """No request is overtaken by more than this many later ones."""


class ShortestPrefill(IndexedPolicy):
    """Orders by tokens of the text that are not cached, plus a charge linear in arrival: as `lpm`, by what is missing.

    Shortest job first (of the prefill) for mixed loads: short prompts do not stand behind long documents.
    """

    api = 1
    Options = ShortestPrefillOptions

    def __init__(self, options: ShortestPrefillOptions, context: PluginContext) -> None:
        longest = context.model.context_length if context.model else 1 << 20
        charge = longest / options.max_overtakes
        self.max_overtakes = options.max_overtakes
        super().__init__(context.page_size, lambda request: request.arrival * charge + len(request.tokens))
