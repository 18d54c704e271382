"""The native routes: POST /generate, text or token ids, one or a batch, with all parameters; pins and sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Service
from phloem.messages import Event, GenerateCall, Usage, pin_call

from ._body import Body
from ._json import JsonRoute
from ._logprobs import entry, prompt_entries
from ._params import encode, new_id
from ._run import Choice, collect, merged, unless_gone
from ._sampling import FIELDS, RENAMED, native_params
from ._schema import Int, TokenId
from ._session import session_hold
from ._sse import DONE, STREAMS, json_response, sse, stream


class GenerateBody(Body):
    """POST /generate. A list of texts or of id lists is a batch; then `rid` is a list, and sampling_params may be."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = Field(None, description=FIELDS)
    stream: bool | None = None
    rid: str | list[str] | None = Field(None, description="Names the call, for /abort; unique among running calls.")
    priority: Int | None = None
    salt: str | None = None
    adapter: str | None = None
    routing_key: str | None = None
    session: str | None = Field(None, description="A conversation whose path stays cached between its turns.")
    session_idle_s: float | None = Field(None, description="Seconds without a turn after which it is let go.")


class EndSessionBody(Body):
    """POST /end_session, with the salt and adapter of the session's requests."""

    session: str
    salt: str | None = None
    adapter: str | None = None


class PinBody(Body):
    """POST /pin: a prefix to keep in the cache."""

    name: str = Field(min_length=1, description="To unpin it by; a pin replaces an older one of its name.")
    text: str | None = None
    messages: list[dict[str, str]] | None = Field(None, description="First messages of chats, by the chat template.")
    input_ids: list[TokenId] | None = None
    salt: str | None = None
    adapter: str | None = None
    routing_key: str | None = None
    priority: Int | None = None


class UnpinBody(Body):
    """POST /unpin."""

    name: str


class NativeApi:
    """Kind `api`: routes for programs that want token ids and everything the engine can tell."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        del options, context

    def router(self, service: Service) -> APIRouter:
        """The routes."""
        router = APIRouter(tags=["native"], route_class=JsonRoute)

        @router.post("/generate", responses=STREAMS)
        async def generate(body: GenerateBody, request: Request) -> Response:
            """Continue a text or token ids. The answer is an object, or a list for a batch or n > 1."""
            started = time.monotonic()
            calls = await _calls(body, service)
            if body.stream:
                return await stream(request, _chunks(service, calls, started))
            results = await unless_gone(request.receive, collect(service, calls))
            answers = [
                _answer(service, call, index, choice, started)
                for call, choices in zip(calls, results, strict=True)
                for index, choice in enumerate(choices)
            ]
            single = isinstance(body.text, str) or (body.input_ids and isinstance(body.input_ids[0], int))
            return json_response(answers[0] if single and len(answers) == 1 else answers)

        @router.post("/end_session")
        async def end_session(body: EndSessionBody) -> Response:
            """Let a conversation's path go, to be evicted like any other; false if none is kept under that name."""
            hold = session_hold(body.session, body.salt, body.adapter, 1, service.info)
            return json_response({"ended": await service.drop_hold(hold or "")})

        @router.post("/pin")
        async def pin(body: PinBody, request: Request) -> Response:
            """Compute a prefix, if need be, and keep it in the cache until it is unpinned."""
            prompt = await _prefix(body, service)
            call = pin_call(
                new_id("pin"),
                body.name,
                prompt,
                salt=body.salt,
                adapter=body.adapter,
                routing_key=body.routing_key,
                priority=body.priority or 0,
            )
            ((choice,),) = await unless_gone(request.receive, collect(service, [call]))
            usage = choice.usage or Usage()
            counts = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            return json_response({"name": body.name, **counts})

        @router.post("/unpin")
        async def unpin(body: UnpinBody) -> Response:
            """Let a pinned prefix go, to be evicted like any other; false if there is none of that name."""
            return json_response({"unpinned": await service.unpin(body.name)})

        return router


async def _calls(body: GenerateBody, service: Service) -> list[GenerateCall]:
    """Check and pack a body: one call per prompt."""
    prompts = await _prompts(body, service)
    batch = len(prompts)
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if rids is None:
        rids = [new_id("gen") for _ in prompts]
    if len(rids) != batch or len(set(rids)) != batch or "" in rids:
        raise RequestError(f"rid must name each of the {batch} prompts, without repeats", param="rid")
    given = body.sampling_params or {}
    settings = given if isinstance(given, list) else [given] * batch
    if len(settings) != batch:
        raise RequestError(f"{len(settings)} sampling_params for {batch} prompts", param="sampling_params")
    hold = session_hold(body.session, body.salt, body.adapter, batch, service.info, body.session_idle_s)
    return [
        GenerateCall(
            call_id=rid,
            prompt=prompt,
            params=native_params(fields),
            priority=body.priority or 0,
            salt=body.salt,
            adapter=body.adapter,
            routing_key=body.routing_key,
            hold=hold,
            hold_idle_s=body.session_idle_s,
            stream=bool(body.stream),
        )
        for rid, prompt, fields in zip(rids, prompts, settings, strict=True)
    ]


async def _prefix(body: PinBody, service: Service) -> list[int]:
    """What is to be pinned, as token ids."""
    if body.messages is None:
        return (await _prompts(body, service))[0]
    if body.text is not None or body.input_ids is not None:
        raise RequestError("give one of text, messages and input_ids", param="messages")
    return await asyncio.to_thread(service.tokenizer.chat_prefix, body.messages)


async def _prompts(body: GenerateBody | PinBody, service: Service) -> list[list[int]]:
    """The prompts as token ids."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [await encode(service, text, "text") for text in texts]
    else:
        ids: Any = body.input_ids
        prompts = [ids] if ids and isinstance(ids[0], int) else ids
    if not prompts or not all(prompts):
        name = "text" if body.text is not None else "input_ids"
        raise RequestError(f"{name} is empty", hint="give at least one token", param=name)
    return prompts


def _meta(call: GenerateCall, index: int, part: Choice | Event, usage: Usage | None, started: float) -> dict[str, Any]:
    """`meta_info`."""
    meta: dict[str, Any] = {"id": call.call_id, "choice": index, "finish_reason": part.finish_reason}
    if part.finish_reason is not None:
        usage = usage or Usage()
        meta |= {
            "stop_reason": part.stop_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": time.monotonic() - started,
        }
        if part.notes:
            meta["notes"] = part.notes
    return meta


def _with_logprobs(service: Service, meta: dict[str, Any], part: Choice | Event) -> dict[str, Any]:
    if part.logprobs is not None:
        meta["logprobs"] = [entry(service.tokenizer, item) for item in part.logprobs]
    if part.prompt_logprobs is not None:
        meta["prompt_logprobs"] = prompt_entries(service.tokenizer, part.prompt_logprobs)
    return meta


def _answer(service: Service, call: GenerateCall, index: int, choice: Choice, started: float) -> dict[str, Any]:
    """One element of the answer."""
    meta = _with_logprobs(service, _meta(call, index, choice, choice.usage, started), choice)
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


async def _chunks(service: Service, calls: list[GenerateCall], started: float) -> AsyncGenerator[bytes, None]:
    """Deltas of all calls: `index` is the prompt's place in the batch, `meta_info.choice` the choice."""
    async with aclosing(merged(service, calls)) as events:
        async for place, event in events:
            meta = _meta(calls[place], event.index, event, event.usage, started)
            delta = {"index": place, "text": event.text, "output_ids": event.token_ids}
            yield sse(delta | {"meta_info": _with_logprobs(service, meta, event)})
    yield DONE
