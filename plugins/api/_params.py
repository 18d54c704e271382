"""From request bodies to calls: sampling parameters, prompts, and the checks that need the model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from phloem.errors import RequestError
from phloem.interfaces import Service, ServiceInfo
from phloem.messages import GenerateCall
from phloem.params import SamplingParams

from ._constraint import Given, in_callers_words
from ._prompt import LONG_TEXT
from ._schema import ChatBody, CompletionBody, Sampling
from ._session import session_hold

COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions API documents for an absent max_tokens
_LISTS = ("stop", "stop_regex")
_CONSTRAINED = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag", "think_tokens")
_NAMES = tuple(
    name for name in SamplingParams.__struct_fields__ if name in Sampling.model_fields and name not in _CONSTRAINED
)


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


def sampling_params(body: Sampling, given: Given | None, **overrides: Any) -> SamplingParams:
    """Validated parameters of a body; `overrides` are the fields that the route derives itself."""
    fields: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(body, name)) is not None}
    fields["think_tokens"] = think_tokens(body)
    if given is not None:
        fields |= given.fields(body.strict)
    fields.update({name: value for name, value in overrides.items() if value is not None})
    for name in _LISTS:
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    if body.logit_bias is not None:
        fields["logit_bias"] = {_bias_key(key): value for key, value in body.logit_bias.items()}
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
    with in_callers_words(given):
        return SamplingParams(**fields)


def generate_calls(
    ids: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams, body: Sampling, info: ServiceInfo
) -> list[GenerateCall]:
    """A call for each prompt, with what the body says beyond sampling."""
    hold = session_hold(body.session, body.cache_salt, None, len(prompts), info, body.session_idle_s)
    return [_call(one, prompt, params, body, hold) for one, prompt in zip(ids, prompts, strict=True)]


def _call(call_id: str, prompt: list[int], params: SamplingParams, body: Sampling, hold: str | None) -> GenerateCall:
    return GenerateCall(
        call_id=call_id,
        prompt=prompt,
        params=params,
        priority=body.priority or 0,
        salt=body.cache_salt,
        hold=hold,
        hold_idle_s=body.session_idle_s,
        stream=bool(body.stream),
    )


def usage_wanted(body: Sampling) -> bool:
    """Whether a stream ends with the usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


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


def completion_params(body: CompletionBody, given: Given | None) -> SamplingParams:
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
    limits = {"max_tokens": max_tokens, "logprobs": body.logprobs, "prompt_logprobs": prompt_logprobs}
    return sampling_params(body, given, **limits)


def chat_params(body: ChatBody, given: Given | None, **overrides: Any) -> SamplingParams:
    """Parameters of /v1/chat/completions; `given` is what the answer must follow, by the body or by its tools."""
    limits = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ", hint="give one", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, given, max_tokens=max(limits, default=None), logprobs=logprobs, **overrides)


def thinking(body: ChatBody, given: Given | None, think: tuple[str, str] | None) -> dict[str, str]:
    """Where thoughts begin and end, for requests that care. Raises RequestError where nobody knows."""
    wanted = think_tokens(body) is not None
    if body.think_end is not None or not (wanted or given is not None):
        return {}
    if think is not None:
        return {"think_start": body.think_start or think[0].strip(), "think_end": think[1]}
    if wanted:
        raise RequestError(
            "think_tokens cannot be honoured: no reasoning parser knows how this model ends a thought",
            hint="set server.reasoning_parser, or give think_end",
            param="think_tokens",
        )
    return {}


def think_tokens(body: Sampling) -> int | None:
    """The budget for thoughts, by either of its names."""
    names = {"think_tokens": body.think_tokens, "thinking_budget": body.thinking_budget}
    given = {value for value in names.values() if value is not None}
    if len(given) > 1:
        raise RequestError("think_tokens and thinking_budget differ", hint="give one", param="thinking_budget")
    return max(given, default=None)


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
