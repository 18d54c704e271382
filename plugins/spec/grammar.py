"""Jump-forward as a draft: what the grammar forces, tokenised as the model would, for the verifier to check."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext
from phloem.request import Namespace

from ._chain import CONTEXT, Chain
from ._memory import Memory, Proposal
from ._words import Words

_ANSWERS, _NAMESPACES = 16_384, 64  # remembered: answers of one namespace, and namespaces


class GrammarDrafter:
    """Kind `spec`: a chain of tokens that spell the bytes which every continuation begins with, and go on from there.

    Forced text is cut as the tokenizer cuts it with the text before. The model may prefer another cut (`{` and `"`
    where the tokenizer has `{"`), and then usually does again: so what followed a token where the cut had another is
    remembered and proposed instead. A token at the end of the forced text is held back where a longer one may stand
    there, until it has been seen which. Behind it one guess is made, only where forced text follows: the token that
    followed there before, at a choice of few tokens in any text of the namespace (a value of an enumeration), in free
    text in this one (the end of a string).
    """

    api = 1
    capabilities = frozenset({"leads", "chain", "constrained", "learns", "inline"})

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
        self._tokenizer, self._model = context.tokenizer, context.model
        self._canonical, self._most = options.forcing == "canonical", options.max_tokens
        self._proposals: dict[str, tuple[Proposal, Memory]] = {}
        self._shared: OrderedDict[Namespace, Memory] = OrderedDict()

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """None without a grammar. Costs some 100 us with xgrammar, most of them in the matcher."""
        if context.matcher is None:
            return None
        last, own = self._proposals.setdefault(context.request_id, (Proposal(), Memory(_ANSWERS)))
        last.learn(context.tokens)
        before, room = context.tokens[-CONTEXT:].tolist(), min(budget, self._most)
        chain = Chain(context.matcher, self._words, before, room, canonical=self._canonical)
        try:
            chain.grow(self._memory(context.namespace), own)
        finally:
            chain.release()
        last.length, last.tokens, last.questions = len(context.tokens), chain.tokens, chain.questions
        return replace(Draft.chain(chain.tokens), forced=chain.forced) if chain.tokens else None

    def forget(self, request_id: str) -> None:
        """Drop what only this request's proposals need."""
        self._proposals.pop(request_id, None)

    def _memory(self, namespace: Namespace) -> Memory:
        memory = self._shared.setdefault(namespace, Memory(_ANSWERS))
        self._shared.move_to_end(namespace)
        if len(self._shared) > _NAMESPACES:
            self._shared.popitem(last=False)
        return memory

    @cached_property
    def _words(self) -> Words:
        return Words(self._tokenizer, self._model)  # not before the first constraint
