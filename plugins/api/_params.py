"""From request bodies to calls: sampling parameters, prompts, and the checks that need the model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from phloem.errors import RequestError
from phloem.interfaces import Service, ServiceInfo
from phloem.params import SamplingParams

from ._schema import ChatBody, CompletionBody, Message, ResponseFormat, Sampling

COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions API documents for an absent max_tokens
LONG_TEXT = 2048  # characters from which tokenising leaves the event loop's thread
_LISTS = ("stop", "stop_regex")
_NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name in Sampling.model_fields)


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


def new_id(prefix: str) -> str:
    """An id for a call, unique across servers."""
    return f"{prefix}-{uuid.uuid4().hex}"


def check_model(name: str | None, info: ServiceInfo) -> None:
    """Refuse a model that is not the served one."""
    if name is not None and name != info.model_name:
        raise UnknownModelError(
            f"the model '{name[:200]}' does not exist", hint=f"this server serves '{info.model_name}'", param="model"
        )


def sampling_params(body: Sampling, **overrides: Any) -> SamplingParams:
    """Validated parameters of a body; `overrides` are the fields that the route derives itself."""
    fields: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(body, name)) is not None}
    fields.update({name: value for name, value in overrides.items() if value is not None})
    for name in _LISTS:
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    if body.logit_bias is not None:
        fields["logit_bias"] = {_bias_key(key): value for key, value in body.logit_bias.items()}
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
    return SamplingParams(**fields)


def _bias_key(key: str) -> int:
    """A token id written as a JSON key."""
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias key '{key[:40]}' is not a token id", param="logit_bias")
    return int(key)


def check_token_ids(tokens: Sequence[int], info: ServiceInfo, param: str) -> None:
    """Refuse ids outside the vocabulary."""
    size = info.spec.vocab_size
    bad = next((t for t in tokens if not 0 <= t < size), None)
    if bad is not None:
        raise RequestError(f"{param} has token id {bad}, outside the vocabulary [0, {size})", param=param)


def completion_params(body: CompletionBody) -> SamplingParams:
    """Parameters of /v1/completions."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of {body.best_of} cannot be honoured", hint=f"only best_of equal to n, which is {n}", param="best_of"
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # nothing but the prompt is wanted; its one token of output is dropped
    return sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


def chat_params(body: ChatBody) -> SamplingParams:
    """Parameters of /v1/chat/completions."""
    limits = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ", hint="give one", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    schema = body.json_schema
    if body.response_format is not None and body.response_format.type != "text":
        if schema is not None:
            raise RequestError("response_format and json_schema are given together", param="response_format")
        schema = _format_schema(body.response_format)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, max_tokens=max(limits, default=None), logprobs=logprobs, json_schema=schema)


def _format_schema(form: ResponseFormat) -> dict[str, Any]:
    """The JSON schema that a response_format asks for."""
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise RequestError(
            "response_format json_schema has no schema",
            hint='give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            param="response_format",
        )
    return form.json_schema.schema_


async def encode(service: Service, text: str, param: str, *, add_special: bool = True) -> list[int]:
    """Token ids of a text, at least one."""
    tokenizer = service.tokenizer
    if len(text) > LONG_TEXT:
        tokens = await asyncio.to_thread(tokenizer.encode, text, add_special)
    else:
        tokens = tokenizer.encode(text, add_special)
    if not tokens:
        raise RequestError(f"{param} is empty", hint="give at least one token", param=param)
    return tokens


async def completion_prompts(body: CompletionBody, service: Service) -> list[list[int]]:
    """The prompts of a completion, one or many, as token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await encode(service, prompt, "prompt")]
    if not prompt:
        raise RequestError("prompt is empty", hint="give a text, token ids, or a list of either", param="prompt")
    if isinstance(prompt[0], int):
        prompt = [prompt]
    return [await encode(service, one, "prompt") if isinstance(one, str) else _checked(one) for one in prompt]


def _checked(tokens: Any) -> list[int]:
    """Token ids as they came; the engine checks their range."""
    if not tokens:
        raise RequestError("prompt is empty", hint="give at least one token", param="prompt")
    return list(tokens)


async def chat_prompt(messages: list[Message], service: Service) -> list[int]:
    """Messages through the model's template, as token ids; the answer's opening is part of it."""
    if not messages:
        raise RequestError("messages is empty", hint="give at least one message", param="messages")
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    if sum(len(message["content"]) for message in plain) > LONG_TEXT:
        return await asyncio.to_thread(service.tokenizer.chat, plain)
    return service.tokenizer.chat(plain)


def _plain(message: Message, index: int) -> dict[str, str]:
    """A message as templates want it: text parts concatenated, `developer` under its older name `system`."""
    where = f"messages[{index}].content"
    content = message.content
    if content is None:
        raise RequestError(f"{where} is missing", param=where)
    if not isinstance(content, str):
        for place, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"{where}[{place}] is of type '{part.type[:40]}', the served model takes text only", param=where
                )
        content = "".join(part.text or "" for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": content}
