"""Answers of /v1/chat/completions: whole, and as stream chunks (role, content, finish, usage)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from phloem.interfaces import Service
from phloem.messages import Event, GenerateCall

from ._logprobs import chat_logprobs, prompt_entries
from ._run import Choice, merged, total_usage
from ._sse import DONE, sse
from ._usage import UsageSum, usage_body


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One chat request on its way: the ids and options that all its answers carry."""

    id: str
    service: Service
    call: GenerateCall
    include_usage: bool = False

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        info = self.service.info
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": info.model_name,
            "choices": choices,
        }

    def whole(self, results: Sequence[Sequence[Choice]]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = [self._choice(index, choice) for index, choice in enumerate(results[0])]
        return self._envelope("chat.completion", choices) | {"usage": usage_body(total_usage(results))}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        tokenizer = self.service.tokenizer
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if choice.logprobs is None else chat_logprobs(tokenizer, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_entries(tokenizer, choice.prompt_logprobs)
        return body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a request with `stream`."""
        opened: set[int] = set()
        usage = UsageSum()
        async with aclosing(merged(self.service, [self.call])) as events:
            async for _, event in events:
                if event.index not in opened:
                    opened.add(event.index)
                    yield self._chunk(event.index, {"role": "assistant", "content": ""}, event, opening=True)
                if event.text or event.logprobs:
                    yield self._chunk(event.index, {"content": event.text}, event)
                if event.finish_reason is not None:
                    usage.add(event)
                    yield self._chunk(event.index, {}, event, finish=True)
        if self.include_usage:
            yield sse(self._envelope("chat.completion.chunk", []) | {"usage": usage.body()})
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], event: Event, *, opening: bool = False, finish: bool = False
    ) -> bytes:
        """One chunk; logprobs travel with content, the reason to stop on a chunk of its own."""
        tokenizer = self.service.tokenizer
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if opening and event.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_entries(tokenizer, event.prompt_logprobs)
        if finish:
            choice |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
        elif not opening and event.logprobs:
            choice["logprobs"] = chat_logprobs(tokenizer, event.logprobs)
        body = self._envelope("chat.completion.chunk", [choice])
        if self.include_usage:
            body["usage"] = None
        return sse(body)
