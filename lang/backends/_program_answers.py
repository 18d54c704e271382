"""Answers of the program routes, whole or in events, as the generation that a program gets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from phloem.messages import TokenLogprob

from .base import Generation


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Token counts of an answer."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {name: usage[name] for name in names if name in usage}


def generation(answer: dict[str, Any]) -> Generation:
    """The server's answer to a generation."""
    outputs = answer.get("choices") or [answer]
    usage = counts(answer.get("usage") or {})
    metas: list[dict[str, Any]] = []
    logprobs = []
    for output in outputs:
        meta = {name: output.get(name) for name in ("finish_reason", "stop_reason")} | usage
        if "token_ids" in output:
            meta["completion_tokens"] = len(output["token_ids"])  # with n > 1 the usage counts all choices
        if output.get("notes"):
            meta["notes"] = output["notes"]
        if output.get("logprobs") is not None:
            meta["tokens"] = [item["token"] for item in output["logprobs"]]
            logprobs.append([_logprob(item) for item in output["logprobs"]])
        metas.append(meta)
    prompt = answer.get("prompt_logprobs") or outputs[0].get("prompt_logprobs")
    if prompt is not None:
        metas[0]["prompt_logprobs"] = [item and _logprob(item) for item in prompt]
        metas[0]["prompt"] = [item["token"] if item else None for item in prompt]
    whole = len(logprobs) == len(outputs)
    return Generation([output["text"] for output in outputs], metas, logprobs if whole else None)


def _logprob(item: dict[str, Any]) -> TokenLogprob:
    top = [(one["token_id"], one["logprob"]) for one in item.get("top_logprobs") or []]
    return TokenLogprob(item["token_id"], item["logprob"], top)


_OF_THE_END = ("finish_reason", "stop_reason", "notes", "prompt_logprobs")


async def together(events: AsyncGenerator[dict[str, Any], None], on_text: Callable[[str], None]) -> dict[str, Any]:
    """The answer that a stream's events make; each delta of the first choice goes to `on_text`."""
    parts: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    async for event in events:
        index = event.get("index", 0)
        part = parts.setdefault(index, {})
        for name in ("text", "token_ids", "logprobs"):
            if event.get(name) is not None:
                part[name] = part[name] + event[name] if name in part else event[name]
        part.update({name: event[name] for name in _OF_THE_END if event.get(name) is not None})
        usage = event.get("usage") or usage
        if event.get("text") and index == 0:
            on_text(event["text"])
    return {"choices": [parts[index] for index in sorted(parts)], "usage": usage}
