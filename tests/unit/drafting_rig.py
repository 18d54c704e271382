"""Vocabularies of a few pieces with a real tokenizer, and a drafter, a matcher and a request over them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, Matcher, PluginContext, TokenizerData
from phloem.params import SamplingParams
from phloem.plugins.spec.grammar import GrammarDrafter
from phloem.request import Namespace
from phloem.testing.plugin import TOY_SPEC
from phloem.testing.toy_grammar import ToyMatcher
from phloem.tokenizer import Tokenizer

END = 0


class Vocabulary:
    """Token 0 ends a text; the others are `pieces`, and a text is cut into the fewest of them."""

    def __init__(self, *pieces: str, normalizer: dict[str, Any] | None = None) -> None:
        self.pieces = ["<end>", *pieces]
        special = {"id": END, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False}
        data: dict[str, Any] = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor"))
        data |= {"version": "1.0", "normalizer": normalizer, "decoder": {"type": "Fuse"}}
        data["added_tokens"] = [special | {"normalized": False, "special": True}]
        scores = [[piece, -1.0] for piece in self.pieces]
        data["model"] = {"type": "Unigram", "unk_id": END, "vocab": scores}
        self.tokenizer = Tokenizer(TokenizerData(json.dumps(data), special_tokens={"eos_token": "<end>"}))
        self.spec = replace(TOY_SPEC, vocab_size=len(self.pieces), eos_token_ids=(END,))

    def ids(self, *pieces: str) -> list[int]:
        """Tokens by their text."""
        return [self.pieces.index(piece) for piece in pieces]

    def matcher(self, pattern: str, *before: str) -> ToyMatcher:
        """Of a pattern, after some pieces of the output."""
        matcher = ToyMatcher(pattern, ["", *self.pieces[1:]], [END])
        assert all(matcher.accept(token) for token in self.ids(*before))
        return matcher

    def drafter(self, **options: Any) -> GrammarDrafter:
        """Of a fresh memory."""
        context = PluginContext("spec", "grammar", model=self.spec, tokenizer=self.tokenizer)
        return GrammarDrafter(GrammarDrafter.Options(**options), context)


def ask(
    drafter: Any, matcher: Matcher | None, tokens: Sequence[int], budget: int = 16, *, call: str = "a", salt: str = ""
) -> Draft | None:
    """One proposal after `tokens`, the first of which is the prompt."""
    context = DraftContext(call, array("i", tokens), 1, Namespace(salt or None), matcher, SamplingParams())
    draft: Draft | None = drafter.propose(context, budget)
    return draft
