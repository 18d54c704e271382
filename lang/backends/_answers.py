"""Answers of OpenAI's two APIs, whole or in chunks, as the generation that a program gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phloem.errors import PhloemError
from phloem.messages import TokenLogprob

from ._failures import broken_off
from .base import Generation

UNKNOWN = -1  # id of a token that the server tells by its text only


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # which stop matched, where the server tells
    logprobs: list[TokenLogprob] | None = None
    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


class Echoed(NamedTuple):
    """A prompt sent back: its tokens, their log-probabilities (the first has none: 0), where they begin in it."""

    tokens: list[str]
    values: list[float]
    offsets: list[int]


class Answers:
    """Collects an answer's choices from bodies (dicts). Most servers send one body, a stream one per chunk."""

    def __init__(self, chat: bool) -> None:
        self._chat = chat
        self._choices: dict[int, _Choice] = {}
        self._usage: Mapping[str, Any] = {}

    def add(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Take a body; returns what it adds to the text of the first choice."""
        self._usage = body.get("usage") or self._usage
        return iter([text for one in body.get("choices") or [] if (text := self._add(one)) and not one["index"]])

    def _add(self, body: Mapping[str, Any]) -> str:
        choice = self._choices.setdefault(body["index"], _Choice())
        text = body.get("text") or (body.get("message") or body.get("delta") or {}).get("content") or ""
        choice.text += text
        choice.finish_reason = body.get("finish_reason") or choice.finish_reason
        choice.stop_reason = body.get("stop_reason", choice.stop_reason)
        found = body.get("logprobs")
        if found:
            choice.logprobs = (choice.logprobs or []) + (_chat_items(found) if self._chat else _text_items(found))
            choice.tokens += found.get("tokens") or [item["token"] for item in found.get("content") or []]
            choice.values += found.get("token_logprobs") or []
            choice.offsets += found.get("text_offset") or []
        return text

    def check(self, url: str, *, streamed: bool) -> None:
        """Raises EngineDeadError for a stream that ended before its choices did, PhloemError for no choices."""
        if streamed and any(choice.finish_reason is None for choice in self._choices.values()):
            raise broken_off(url)
        if not self._choices:
            raise broken_off(url) if streamed else PhloemError(f"{url} has answered without any choice")

    def generation(self) -> Generation:
        """All choices, in order."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        details = self._usage.get("prompt_tokens_details") or {}
        counts = {name: self._usage[name] for name in ("prompt_tokens", "completion_tokens") if name in self._usage}
        if details.get("cached_tokens") is not None:
            counts["cached_tokens"] = details["cached_tokens"]
        meta = [
            {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **counts}
            | ({"tokens": choice.tokens} if choice.tokens else {})
            for choice in choices
        ]
        logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
        texts = [choice.text for choice in choices]
        return Generation(texts, meta, logprobs if len(logprobs) == len(choices) else None)

    def echoes(self, prompts: Sequence[str]) -> list[Echoed] | None:
        """Each prompt as the server has cut and scored it; None unless it has sent back all of each."""
        found = []
        for index, prompt in enumerate(prompts):
            choice = self._choices.get(index)
            if choice is None or not choice.text.startswith(prompt):
                return None
            if not len(choice.values) == len(choice.tokens) == len(choice.offsets):
                return None
            if not choice.tokens or any(value is None for value in choice.values[1:]):
                return None
            found.append(Echoed(choice.tokens, [value or 0.0 for value in choice.values], choice.offsets))
        return found


def _chat_items(found: Mapping[str, Any]) -> list[TokenLogprob]:
    items = []
    for item in found.get("content") or []:
        top = [(one.get("token_id", UNKNOWN), one["logprob"]) for one in item.get("top_logprobs") or []]
        items.append(TokenLogprob(item.get("token_id", UNKNOWN), item["logprob"], top))
    return items


def _text_items(found: Mapping[str, Any]) -> list[TokenLogprob]:
    values: list[float | None] = found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [None] * len(values)
    return [
        TokenLogprob(UNKNOWN, value if value is not None else 0.0, [(UNKNOWN, one) for one in (top or {}).values()])
        for value, top in zip(values, tops, strict=True)
    ]
