"""Jump-forward as a draft: what the grammar forces, tokenised as the model would, for the verifier to check."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, Matcher, PluginContext

_CONTEXT_TOKENS = 4  # of the text before; looking back further changes no tokenisation of forced text (llguidance)
_REMEMBERED = 4096  # tokenisations


class GrammarDrafter:
    """Kind `spec`: a chain of tokens that spell the bytes which every continuation begins with."""

    api = 1
    capabilities = frozenset({"leads", "chain", "constrained"})

    class Options(BaseModel):
        """`spec: [{use: grammar}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        forcing: Literal["verified", "canonical"] = "verified"
        """`canonical` accepts forced tokens without asking the model: faster, and not the model's own distribution."""
        max_tokens: int = Field(default=16, ge=1)
        """Most tokens of one proposal."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        assert context.tokenizer is not None, "forced text needs the tokenizer"
        assert context.model is not None, "and the model's vocabulary size"
        self._options, self._tokenizer = options, context.tokenizer
        self._size = context.model.vocab_size
        self._ends = frozenset(context.model.eos_token_ids)
        self._words: dict[bytes, int] | None = None
        self._longest = 1
        self._known: OrderedDict[tuple[tuple[int, ...], bytes], tuple[int, ...]] = OrderedDict()

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """Forced text, token by token, as far as the grammar goes on forcing. Some 50 us where it is remembered."""
        if context.matcher is None:
            return None
        matcher, budget = context.matcher, min(budget, self._options.max_tokens)
        tokens = array("i", context.tokens[-_CONTEXT_TOKENS:])
        known = len(tokens)
        try:
            while (room := budget - len(tokens) + known) > 0:
                more = self._more(tokens, matcher)[:room]
                taken = 0
                for token in more:
                    if not matcher.accept(token):
                        break
                    tokens.append(token)
                    taken += 1
                if not more or taken < len(more):
                    break
        finally:
            matcher.rollback(len(tokens) - known)
        chain = tokens[known:].tolist()
        if not chain:
            return None
        forced = len(chain) if self._options.forcing == "canonical" else 0
        return Draft(tuple(chain), tuple(range(-1, len(chain) - 1)), forced=forced)

    def forget(self, request_id: str) -> None:
        """Nothing is kept of a request."""

    def _more(self, tokens: array[int], matcher: Matcher) -> Sequence[int]:
        """Tokens of the bytes forced here; the single token that the mask allows where no byte is known."""
        forced = matcher.forced()
        if forced:
            return self._tokens(tuple(tokens[-_CONTEXT_TOKENS:]), forced)
        row = np.empty((self._size + 31) // 32, dtype=np.int32)
        matcher.fill(row)
        words = np.flatnonzero(row)
        if len(words) != 1:
            return ()
        word = int(row[words[0]]) & 0xFFFFFFFF
        token = int(words[0]) * 32 + word.bit_length() - 1
        return () if word & (word - 1) or token in self._ends else (token,)

    def _tokens(self, before: tuple[int, ...], forced: bytes) -> tuple[int, ...]:
        key = (before, forced)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = tuple(self._canonical(before, forced) or self._longest_match(forced))
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return found

    def _canonical(self, before: tuple[int, ...], forced: bytes) -> list[int]:
        """As the tokenizer cuts the text before and the forced text together; [] if it would cut the former anew."""
        for skip in range(len(before)):
            head = b"".join(self._tokenizer.token_bytes(token) for token in before[skip:])
            try:
                ids = self._tokenizer.encode((head + forced).decode(), add_special=False)
            except UnicodeDecodeError:
                continue  # the text before begins inside a character, or the forced one ends inside
            count = len(before) - skip
            spelled = b"".join(self._tokenizer.token_bytes(token) for token in ids)
            if tuple(ids[:count]) == before[skip:] and spelled == head + forced:  # no normaliser changed it
                return ids[count:]
        return []

    def _longest_match(self, forced: bytes) -> list[int]:
        """Always the longest token that fits."""
        if self._words is None:
            barred = self._ends | self._tokenizer.special_ids
            pairs = ((self._tokenizer.token_bytes(token), token) for token in range(self._size) if token not in barred)
            self._words = {text: token for text, token in pairs if text}
            self._longest = max(map(len, self._words), default=1)
        tokens: list[int] = []
        at = 0
        while at < len(forced):
            end = next(
                (e for e in range(min(len(forced), at + self._longest), at, -1) if forced[at:e] in self._words), at
            )
            if end == at:
                break
            tokens.append(self._words[forced[at:end]])
            at = end
        return tokens
