"""Answers of /v1/chat/completions: whole, and as stream chunks (role, parts of the message, finish, usage)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from phloem.interfaces import Piece, Service
from phloem.messages import Event, GenerateCall

from ._logprobs import chat_logprobs, prompt_entries
from ._reader import Reader
from ._run import Choice, merged, total_usage
from ._sse import DONE, sse
from ._usage import UsageSum, usage_body

_FIELDS = {"content": "content", "reasoning": "reasoning_content"}


def _opened(name: str) -> dict[str, Any]:
    """A call whose name is known."""
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece as a stream shows it."""
    if piece.kind in _FIELDS:
        return {_FIELDS[piece.kind]: piece.text}
    new = _opened(piece.text) if piece.kind == "call" else {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.call, **new}]}


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One chat request on its way: the ids and options that all its answers carry."""

    id: str
    service: Service
    call: GenerateCall
    reader: Callable[[], Reader]  # of one choice
    reasoning: bool = False  # thoughts are shown, on their own
    tools: bool = False
    include_usage: bool = False
    noted: Callable[[Sequence[str]], list[str]] = list  # notes in the caller's words

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
        message = self._message(choice.text)
        body: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None if choice.logprobs is None else chat_logprobs(tokenizer, choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, called="tool_calls" in message),
            "stop_reason": choice.stop_reason,
        }
        if choice.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_entries(tokenizer, choice.prompt_logprobs)
        return body | ({"notes": self.noted(choice.notes)} if choice.notes else {})

    def _message(self, text: str) -> dict[str, Any]:
        """The message that a text is. Null content: there are calls or thoughts, and nothing else."""
        reader = self.reader()
        parts = {"content": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for piece in [*reader.push(text), *reader.finish()]:
            if piece.kind in parts:
                parts[piece.kind] += piece.text
            elif piece.kind == "call":
                calls.append(_opened(piece.text))
            else:
                calls[piece.call]["function"]["arguments"] += piece.text
        empty = None if calls or parts["reasoning"] else ""
        message: dict[str, Any] = {"role": "assistant", "content": parts["content"] or empty, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = parts["reasoning"] or None
        return message | ({"tool_calls": calls} if calls else {})

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a request with `stream`."""
        readers: dict[int, Reader] = {}
        called: set[int] = set()
        usage = UsageSum()
        async with aclosing(merged(self.service, [self.call])) as events:
            async for _, event in events:
                if event.index not in readers:
                    readers[event.index] = self.reader()
                    yield self._opening(event)
                pieces = readers[event.index].push(event.text) if event.text else []
                if event.finish_reason is not None:
                    pieces += readers[event.index].finish()
                called |= {event.index for piece in pieces if piece.kind == "call"}
                deltas = [_delta(piece) for piece in pieces] or ([{}] if event.logprobs else [])
                for place, delta in enumerate(deltas):  # log-probabilities of an event go with the first it brings
                    entries = event.logprobs if place == 0 else None
                    logprobs = chat_logprobs(self.service.tokenizer, entries) if entries else None
                    yield self._chunk(event.index, delta, logprobs=logprobs)
                if event.finish_reason is not None:
                    usage.add(event)
                    yield self._finish(event, called=event.index in called)
        if self.include_usage:
            yield sse(self._envelope("chat.completion.chunk", []) | {"usage": usage.body()})
        yield DONE

    def _opening(self, event: Event) -> bytes:
        """The first chunk of a choice. Where there may be no content its absence must stay possible."""
        more = {}
        if event.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_entries(self.service.tokenizer, event.prompt_logprobs)
        content = None if self.tools or self.reasoning else ""
        return self._chunk(event.index, {"role": "assistant", "content": content}, **more)

    def _finish(self, event: Event, *, called: bool) -> bytes:
        """The last chunk of a choice: why it ended."""
        more: dict[str, Any] = {"notes": self.noted(event.notes)} if event.notes else {}
        reason = _reason(event.finish_reason, called=called)
        return self._chunk(event.index, {}, finish_reason=reason, stop_reason=event.stop_reason, **more)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        body = self._envelope("chat.completion.chunk", [choice])
        if self.include_usage:
            body["usage"] = None
        return sse(body)


def _reason(reason: str | None, *, called: bool) -> str | None:
    """OpenAI's word for an answer that ended with calls."""
    return "tool_calls" if called and reason == "stop" else reason
