"""Drafter: the rest of a phrase that is written often, once its beginning is there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext


class Phrasebook:
    """Continues the end of a text by the phrases that begin with it, the longest match first."""

    api = 1
    capabilities = frozenset({"chain"})  # it never proposes siblings, so a kernel without tree masks will do

    class Options(BaseModel):
        """Options of `spec: [{use: phrasebook}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        phrases: tuple[str, ...] = ()
        """Texts that are written often."""
        match: int = Field(default=2, ge=1)
        """Tokens of a phrase that must be there before the rest is proposed."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._match = options.match
        self._rests: dict[tuple[int, ...], list[int]] = {}  # behind each few tokens of a phrase
        for phrase in options.phrases:
            assert context.tokenizer is not None, "phrases need the tokenizer"
            for text in (phrase, " " + phrase):  # at the beginning of a text, and within it
                self.learn(context.tokenizer.encode(text, add_special=False))

    def learn(self, tokens: list[int]) -> None:
        """One more phrase, as tokens. Of two phrases with the same place the first counts."""
        for end in range(self._match, len(tokens)):
            self._rests.setdefault(tuple(tokens[end - self._match : end]), tokens[end:])

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """One look-up, so nothing to keep between two calls."""
        rest = self._rests.get(tuple(context.tokens[-self._match :]), [])[:budget]
        return Draft(tuple(rest), tuple(range(-1, len(rest) - 1)), confidence=(0.8,) * len(rest)) if rest else None

    def forget(self, request_id: str) -> None:
        """Nothing is kept of requests."""
