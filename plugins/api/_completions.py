"""Answers of /v1/completions: several prompts, `n` choices each, echo, and the older logprobs format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from phloem.interfaces import Service
from phloem.messages import Event, GenerateCall, TokenLogprob

from ._logprobs import Offsets, legacy_logprobs, prompt_entries
from ._run import Choice, merged, total_usage
from ._sse import DONE, sse
from ._usage import UsageSum, usage_body


@dataclass(slots=True)
class CompletionAnswer:
    """One completion request on its way. Choice `i` of prompt `p` has index p * n + i."""

    id: str
    service: Service
    calls: Sequence[GenerateCall]
    prompts: Sequence[str]  # the texts to echo, one per call; empty strings without echo
    echo: bool
    logprobs: bool
    prompt_logprobs: bool = False
    output: bool = True  # False: only the echoed prompt is wanted (max_tokens 0)
    include_usage: bool = False
    _offsets: dict[int, Offsets] = field(default_factory=dict)  # by choice; there once a choice has sent something

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        now, name = int(time.time()), self.service.info.model_name
        return {"id": self.id, "object": "text_completion", "created": now, "model": name, "choices": choices}

    def whole(self, results: Sequence[Sequence[Choice]]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        usage = total_usage(results)
        if not self.output:
            usage.completion_tokens = 0
        choices = [
            self._body(call, index, choice, first=True, reason=choice.finish_reason)
            for call, outputs in enumerate(results)
            for index, choice in enumerate(outputs)
        ]
        return self._envelope(choices) | {"usage": usage_body(usage)}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a request with `stream`."""
        usage = UsageSum()
        async with aclosing(merged(self.service, self.calls)) as events:
            async for call, event in events:
                if event.finish_reason is not None:
                    usage.add(event)
                body = self._event(call, event)
                if body is not None:
                    envelope = self._envelope([body])
                    yield sse(envelope | {"usage": None} if self.include_usage else envelope)
        if self.include_usage:
            yield sse(self._envelope([]) | {"usage": usage.body()})
        yield DONE

    def _event(self, call: int, event: Event) -> dict[str, Any] | None:
        """The chunk of one event, None if it has nothing to show."""
        first = call * self.calls[0].params.n + event.index not in self._offsets
        shown = event.text or event.logprobs or event.prompt_logprobs or event.finish_reason
        if not shown and not (first and self.echo):
            return None
        part = Choice(text=event.text, logprobs=event.logprobs, stop_reason=event.stop_reason, notes=event.notes)
        part.prompt_logprobs = event.prompt_logprobs
        return self._body(call, event.index, part, first=first, reason=event.finish_reason)

    def _body(self, call: int, index: int, part: Choice, *, first: bool, reason: str | None) -> dict[str, Any]:
        """One element of `choices`: a whole choice, or what is new of it; the first one brings the echo."""
        place = call * self.calls[0].params.n + index
        prompt = self.prompts[call] if self.echo and first else ""
        text = prompt + (part.text if self.output else "")
        offsets = self._offsets.get(place)
        if offsets is None:
            hidden = self.calls[call].params.skip_special_tokens
            offsets = self._offsets[place] = Offsets(self.service.tokenizer, skip_special_tokens=hidden)
        body: dict[str, Any] = {"index": place, "text": text, "logprobs": None, "finish_reason": reason}
        if not self.output and reason is not None:
            body["finish_reason"] = "length"
        body["stop_reason"] = part.stop_reason
        if part.notes:
            body["notes"] = part.notes
        if self.logprobs:
            items: list[TokenLogprob | None] = list(part.logprobs or []) if self.output else []
            if prompt and part.prompt_logprobs is not None:
                items = [*part.prompt_logprobs, *items]
            if items:
                body["logprobs"] = legacy_logprobs(
                    self.service.tokenizer, items, first=self.calls[call].prompt[0], offsets=offsets
                )
        if self.prompt_logprobs and part.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_entries(self.service.tokenizer, part.prompt_logprobs)
        return body
