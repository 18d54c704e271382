"""Keeps the hidden states of what an engine writes, for a head to be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from phloem.drafts import Draft
from phloem.errors import ModelError
from phloem.features import Seen
from phloem.interfaces import DraftContext, PluginContext
from phloem.request import Request

USE = f"{__name__}:Recorder"
_LARGEST = torch.finfo(torch.float16).max


class Text(NamedTuple):
    """A prompt and its answer, without the last token or two, whose states are never told."""

    tokens: list[int]
    prompt_len: int
    greedy: bool  # whether each answer token was the likeliest
    states: torch.Tensor  # [len(tokens), layers, hidden] float16


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    request: Request
    pieces: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class Recorder:
    """Kind `spec`: proposes nothing, and keeps the states of whole texts at the given layers while it is `on`.

    An engine of `train-drafter` has it as its only drafter, with a cache that shares nothing: what comes out of a cache
    is computed by nobody. Half precision holds what a head reads; a value beyond its range becomes its largest.
    """

    api = 1
    capabilities = frozenset({"inline", "chain", "features"})
    requires = frozenset({"model:hidden_states", "model:parts"})

    class Options(BaseModel):
        """What to keep."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        layers: tuple[int, ...] = ()
        """What a head reads, as `phloem.features.HiddenStates` counts; none given: an early, a late and the last."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises ModelError for a target that no head can draft for."""
        assert context.model is not None, "states are a model's"
        depth = context.model.depth
        if not context.model.layers:
            hint = "choose a model with layers that attend"
            raise ModelError(f"{context.model.name} has recurrent layers only: a head has no slots there", hint=hint)
        self.read = options.layers or tuple(sorted({depth * 3 // 10, depth * 6 // 10, depth}))
        # the last layer's are kept in any case: what the target would write is computed from them
        self.layers = self.read if depth in self.read else (*self.read, depth)
        self.on = False
        self._open: dict[str, _Open] = {}
        self._ended: list[Text] = []

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """Nothing."""
        return None

    def observe(self, seen: Sequence[Seen]) -> None:
        """As `SeesStates`. A text that begins anew was retracted."""
        for one in seen if self.on else ():
            text = self._open.setdefault(one.request.id, _Open(one.request))
            if one.start == 0:
                text.pieces, text.length = [], 0
            if one.start != text.length:
                raise ValueError(f"the states of tokens {text.length} to {one.start} are missing")
            text.pieces.append(one.states.clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16))
            text.length += len(one.states)

    def forget(self, request_id: str) -> None:
        """The text is whole. On the loop's thread, before its caller has the result."""
        text = self._open.pop(request_id, None)
        if text is not None and text.pieces:
            request, n = text.request, min(text.length, len(text.request.tokens))
            states = torch.cat(text.pieces)[:n]
            ended = Text(request.tokens[:n].tolist(), request.prompt_len, request.params.greedy, states)
            self._ended.append(ended)

    def take(self) -> list[Text]:
        """The texts that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended
