"""The door: checks a call against what this engine can honour, and turns it into requests, one per choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import scoring
from .errors import ContextError, RequestError
from .interfaces import LogitsProcessor, Policy
from .keys import KeyScheme, rekey
from .memory import MemoryPlan
from .messages import GenerateCall
from .model_spec import ModelSpec
from .request import Request
from .text import TextStream
from .tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Admission:
    """Refuses at arrival what can never be served, with the parameter's name; used on the loop's thread."""

    spec: ModelSpec
    tokenizer: Tokenizer
    memory: MemoryPlan
    policy_name: str
    policy: Policy
    processors: Mapping[str, LogitsProcessor]
    seed: int | None  # makes unseeded calls reproducible, one after another
    step_tokens: int  # most tokens of one step
    scheme: KeyScheme | None
    _arrivals: int = field(default=0, init=False)

    def requests(self, call: GenerateCall) -> list[Request]:
        """The call's choices, ready to queue. Raises RequestError."""
        if call.score is not None:
            scoring.check(call, self.spec.vocab_size, self.step_tokens)
        params = call.params
        want = params.max_tokens if call.score is None else max(map(len, call.score))
        self._check_prompt(call, want)
        self._check_features(call)
        asked = self.memory.max_total_tokens if want is None else len(call.prompt) + want
        seed = params.seed if params.seed is not None else self._draw_seed()
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.spec.eos_token_ids)
        )
        made = []
        for choice in range(params.n):
            self._arrivals += 1
            request = Request(call, choice, seed=seed, limit=asked, arrival=self._arrivals)
            request.text = TextStream(self.tokenizer, params)
            request.stop_ids = stop_ids
            rekey(request, self.scheme)
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = [None]
            if call.score is not None:
                request.scoring = scoring.Scoring(call.score)
            made.append(request)
        return made

    def _draw_seed(self) -> int:
        if self.seed is None:
            return secrets.randbits(63)
        return (self.seed * 0x9E3779B97F4A7C15 + self._arrivals) & (2**63 - 1)

    def _check_prompt(self, call: GenerateCall, want: int | None) -> None:
        if not call.prompt:
            raise RequestError("the prompt is empty", hint="give at least one token", param="prompt")
        low, high = min(call.prompt), max(call.prompt)
        if low < 0 or high >= self.spec.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"token {bad} is outside the vocabulary of {self.spec.vocab_size}", param="prompt")
        length, most = len(call.prompt), self.memory.max_total_tokens
        if length + (want or 1) > most:
            named = "max_tokens" if call.score is None else "score"
            asked = "at least 1 of output" if want is None else f"{named} {want}"
            raise ContextError(
                f"prompt of {length} tokens + {asked} = {length + (want or 1)} exceeds the limit of {most} tokens "
                f"({self.memory.why_max})",
                hint="shorten the prompt or lower max_tokens",
                param="prompt" if length + 1 > most else named,
            )

    def _check_features(self, call: GenerateCall) -> None:
        params = call.params
        if call.adapter is not None and "adapters" not in self.spec.capabilities:
            raise RequestError(f"adapter {call.adapter!r} is not available: this model has none", param="adapter")
        if call.priority != 0 and "priority" not in self.policy.capabilities:
            raise RequestError(
                f"priority {call.priority} cannot be honoured: schedule policy {self.policy_name!r} ignores it",
                hint="choose a schedule policy that reads priorities, or leave priority at 0",
                param="priority",
            )
        for token in (*(params.logit_bias or ()), *params.stop_token_ids):
            if token >= self.spec.vocab_size:
                where = "stop_token_ids" if token in params.stop_token_ids else "logit_bias"
                raise RequestError(f"token {token} is outside the vocabulary of {self.spec.vocab_size}", param=where)
        for name, arguments in (params.logits_processors or {}).items():
            if name not in self.processors:
                known = ", ".join(self.processors) or "none; add it under `samplers:`"
                raise RequestError(
                    f"unknown logits processor {name!r} (configured: {known})", param="logits_processors"
                )
            self.processors[name].validate(arguments)
