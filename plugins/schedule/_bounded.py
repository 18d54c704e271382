"""The option that most policies have, and the ageing that follows from it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext


class BoundedOptions(BaseModel):
    """Options of a policy that bounds overtaking."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_overtakes: int = Field(default=512, ge=1)
    """No request is overtaken by more than this many later ones."""


def charge(options: BoundedOptions, context: PluginContext) -> float:
    """Tokens to charge per arrival, so that none that came more than `max_overtakes` later can outweigh a text."""
    longest = context.model.context_length if context.model else 1 << 20
    return longest / options.max_overtakes
