"""Longest prefix match first, with ageing that bounds how often a request may be overtaken (design §7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext
from phloem.request import Request


class LpmOptions(BaseModel):
    """Options of `schedule: {use: lpm}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_overtakes: int = Field(default=512, ge=1)
    """No request is overtaken by more than this many later ones."""


class Lpm:
    """Orders by cached tokens minus a charge linear in arrival, so order keys of waiting requests never drift.

    A later request passes an earlier one only if its longer match outweighs the arrivals between them. With a charge
    of context / max_overtakes per arrival, none that came more than `max_overtakes` later can.
    """

    api = 1
    Options = LpmOptions
    capabilities = frozenset({"matched"})

    def __init__(self, options: LpmOptions, context: PluginContext) -> None:
        longest = context.model.context_length if context.model else 1 << 20
        self._charge = longest / options.max_overtakes

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Most valuable first; ties keep arrival order."""
        return sorted(waiting, key=lambda r: r.arrival * self._charge - r.matched)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The core's choice: the latest arrival."""
        return None
