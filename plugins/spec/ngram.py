"""Drafts from text that is there already: what followed the last tokens before, in this text or in others."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext

from ._contexts import ROOT, Contexts
from ._lookup import occurrences
from ._shared import Generations, Shared
from ._tree import Place, grow

_TAKEN_IN = 64  # tokens of a request that others learn from in one step; a long prompt takes several


@dataclass(slots=True)
class _Reading:
    """How far a request's text is in the shared memory."""

    memory: Generations[Contexts]
    number: int
    state: int = ROOT
    length: int = 0


class NgramDrafter:
    """Kind `spec`: prompt lookup in the request's own text, and an automaton over the texts of its namespace.

    The longest match at the end of the text is taken, and what followed its latest occurrences becomes a tree: a branch
    where they differ, best first by how often. Costs 20 to 100 us a proposal.
    """

    api = 1
    capabilities = frozenset({"learns", "inline"})

    class Options(BaseModel):
        """`spec: [{use: ngram}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        min_match: int = Field(default=2, ge=1)
        """Fewest tokens at the text's end that must have stood together before."""
        max_match: int = Field(default=16, ge=1)
        """Longest match that is looked for in the request's own text."""
        max_tokens: int = Field(default=16, ge=1)
        """Most nodes of one proposal."""
        breadth: int = Field(default=2, ge=1, le=16)
        """Most continuations of one node; 1 proposes chains."""
        depth: int = Field(default=6, ge=2, le=18)
        """Tokens that the automaton over all texts of a namespace looks at together, the proposed one included."""
        memory: int = Field(default=131_072, ge=0)
        """Most nodes of that automaton, in each namespace, of some 150 bytes each. 0: no request learns of another."""

        @model_validator(mode="after")
        def _ordered(self) -> NgramDrafter.Options:
            if self.max_match < self.min_match:
                raise ValueError(f"max_match {self.max_match} is less than min_match {self.min_match}")
            return self

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._options = options
        self._shared = Shared(lambda: Contexts(options.depth), options.memory)
        self._readings: dict[str, _Reading] = {}

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """A tree of at most `max_tokens` nodes."""
        options, places = self._options, list[Place]()
        own = occurrences(context.tokens, options.min_match, options.max_match)
        if own is not None:
            places.append(own)
        if options.memory:
            places += self._others(context)
        return grow(places, min(budget, options.max_tokens), options.breadth)

    def forget(self, request_id: str) -> None:
        """What its namespace has learned of it stays."""
        self._readings.pop(request_id, None)

    def _others(self, context: DraftContext) -> list[Place]:
        """Where the text's end stands in the automata; they learn the text on the way."""
        memory = self._learn(context)
        found: list[Place] = []
        tail = context.tokens[1 - self._options.depth :]
        for contexts in (memory.young, memory.old):
            known = contexts.known(contexts.find(tail), self._options.min_match) if contexts is not None else None
            if known is not None:
                found.append(known)
        return found

    def _learn(self, context: DraftContext) -> Generations[Contexts]:
        reading = self._readings.get(context.request_id)
        if reading is None:
            memory = self._shared.of(context.namespace)
            reading = self._readings[context.request_id] = _Reading(memory, memory.number)
        memory = reading.memory
        memory.age()
        if reading.number != memory.number:
            reading.number, reading.state = memory.number, ROOT
        end = min(len(context.tokens) - context.chain, reading.length + _TAKEN_IN)
        new: array[int] = context.tokens[reading.length : end]
        state, learn = reading.state, memory.young.learn
        for token in new:
            state = learn(state, token)
        reading.state, reading.length = state, reading.length + len(new)
        return memory
