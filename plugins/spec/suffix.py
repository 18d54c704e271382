"""Drafts by suffix automata, as long as the match behind them is good."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext
from phloem.request import Namespace

from ._automaton import ROOT, Automaton, Spot
from ._shared import Generations, Shared
from ._tree import Place, grow

_TAKEN_IN = 512  # tokens of a prompt in one step, about 1.5 ms
_TAIL = 64  # longest match that is looked for in other texts than the one that is being written
_REMEMBERED = 2048  # last tokens of an output that its namespace remembers


@dataclass(slots=True)
class _Own:
    """The automaton of one request's text, and how far it has read."""

    namespace: Namespace
    memory: Generations[Automaton]
    prompt: int
    number: int = 0
    last: int = ROOT
    text: array[int] = field(default_factory=lambda: array("i"))


class SuffixDrafter:
    """Kind `spec`: the longest suffix of the text that stood before in it, or in other outputs of its namespace.

    After Oliaro et al., SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications (arXiv:2411.04975):
    a tree by frequency, as deep as the match is long times `factor`. Costs 20 to 100 us a proposal.
    """

    api = 1
    capabilities = frozenset({"learns", "inline"})

    class Options(BaseModel):
        """`spec: [{use: suffix}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        factor: float = Field(default=2.0, gt=0, le=64, allow_inf_nan=False)
        """Most depth of a draft for each token of the match."""
        min_match: int = Field(default=2, ge=1)
        """Fewest tokens at the text's end that must have stood together before."""
        max_tokens: int = Field(default=16, ge=1)
        """Most nodes of one proposal."""
        breadth: int = Field(default=2, ge=1, le=16)
        """Most continuations of one node; 1 proposes chains."""
        own: int = Field(default=65_536, ge=256)
        """Most tokens that are remembered of a request's own text, of some 100 bytes each."""
        memory: int = Field(default=131_072, ge=0)
        """Most tokens that are remembered of other outputs, in each namespace. 0: no request learns of another."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._options = options
        self._shared = Shared(Automaton, options.memory)
        self._requests: dict[str, _Own] = {}

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """A tree of at most `max_tokens` nodes; None while a long prompt is being read."""
        own = self._requests.get(context.request_id)
        if own is None:
            memory = Generations(Automaton, self._options.own)
            own = self._requests[context.request_id] = _Own(context.namespace, memory, context.prompt_len)
        if not self._read(own, context):
            return None
        places = self._places(own, context)
        return grow(places, min(budget, self._options.max_tokens), self._options.breadth)

    def forget(self, request_id: str) -> None:
        """Its output becomes one that others learn from."""
        own = self._requests.pop(request_id, None)
        if own is None or not self._options.memory:
            return
        memory = self._shared.of(own.namespace)
        memory.age()
        state, extend = ROOT, memory.young.extend
        for token in own.text[own.prompt :][-_REMEMBERED:]:
            state = extend(state, token)

    def _read(self, own: _Own, context: DraftContext) -> bool:
        """Take in what has been written since; True if that is all there is."""
        end = len(context.tokens) - context.chain
        new = context.tokens[len(own.text) : min(end, len(own.text) + _TAKEN_IN)]
        own.memory.age()
        if own.number != own.memory.number:
            own.number, own.last = own.memory.number, ROOT
        last, extend = own.last, own.memory.young.extend
        for token in new:
            last = extend(last, token)
        own.last = last
        own.text.extend(new)
        return len(own.text) == end

    def _places(self, own: _Own, context: DraftContext) -> list[Place]:
        """Where the text's end stood before."""
        tail = context.tokens[-_TAIL:].tolist()
        shared = self._shared.of(own.namespace)
        older = [own.memory.old, shared.young, shared.old]
        found = [(automaton, *automaton.match(tail)) for automaton in older if automaton is not None and len(automaton)]
        young = own.memory.young
        found.append((young, *(young.match(tail) if context.chain else young.suffix(own.last))))
        room = self._options.factor
        return [
            Spot(automaton, state, match, int(match * room))
            for automaton, state, match in found
            if match >= self._options.min_match
        ]
