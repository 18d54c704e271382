"""The OpenAI-compatible routes: completions, chat completions, models, tokenize, detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Service, ServiceInfo

from ._chat_call import chat_answer, template_prompt
from ._completions import CompletionAnswer
from ._constraint import Given, given_constraints, in_callers_words, single
from ._json import JsonRoute
from ._params import (
    check_model,
    check_token_ids,
    completion_params,
    completion_prompts,
    encode,
    generate_calls,
    new_id,
    usage_wanted,
)
from ._parsers import Parsers
from ._run import collect, unless_gone
from ._schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from ._sse import STREAMS, json_response, stream
from ._tools import toolset


class OpenAIApi:
    """Kind `api`: what OpenAI's clients speak. A parameter that cannot be honoured is refused by name."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """`context.extras["parsers"]` names the parsers for `tools` and `reasoning`. Raises PluginError."""
        del options
        self._parsers = Parsers(context.extras.get("parsers", {}))

    def router(self, service: Service) -> APIRouter:
        """All routes of this API."""
        router = APIRouter(tags=["openai"], route_class=JsonRoute)
        _add_completions(router, service)
        _add_chat(router, service, self._parsers)
        _add_models(router, service)
        _add_tokenizer(router, service, self._parsers)
        return router


async def _completion_answer(body: CompletionBody, given: Given | None, service: Service) -> CompletionAnswer:
    """Check, tokenise and pack a completion request."""
    check_model(body.model, service.info)
    params = completion_params(body, given)
    prompts = await completion_prompts(body, service)
    request_id = new_id("cmpl")
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    echoed = [""] * len(prompts)
    if body.echo:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        echoed = [
            text if isinstance(text, str) else service.tokenizer.decode(prompt, params.skip_special_tokens)
            for text, prompt in zip(texts if len(texts) == len(prompts) else prompts, prompts, strict=True)
        ]
    return CompletionAnswer(
        id=request_id,
        service=service,
        calls=generate_calls(ids, prompts, params, body, service.info),
        prompts=echoed,
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        output=body.max_tokens != 0,
        include_usage=usage_wanted(body),
    )


def _add_completions(router: APIRouter, service: Service) -> None:
    """Text that goes on."""

    @router.post("/v1/completions", responses=STREAMS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        given = single(given_constraints(body))
        answer = await _completion_answer(body, given, service)
        with in_callers_words(given):
            if body.stream:
                return await stream(request, answer.chunks())
            return json_response(answer.whole(await unless_gone(request.receive, collect(service, answer.calls))))


def _add_chat(router: APIRouter, service: Service, parsers: Parsers) -> None:
    """Conversations."""

    @router.post("/v1/chat/completions", responses=STREAMS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, through the model's own template."""
        check_model(body.model, service.info)
        answer, given = await chat_answer(body, service, parsers.formats(service.tokenizer))
        with in_callers_words(given):
            if body.stream:
                return await stream(request, answer.chunks())
            return json_response(answer.whole(await unless_gone(request.receive, collect(service, [answer.call]))))


def _model_body(info: ServiceInfo) -> dict[str, Any]:
    return {
        "id": info.model_name,
        "object": "model",
        "created": int(info.created_s),
        "owned_by": "phloem",
        "max_model_len": info.max_total_tokens,
    }


def _add_models(router: APIRouter, service: Service) -> None:
    """The served model, as a list and alone."""

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [_model_body(service.info)]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """The served model by its name."""
        check_model(model, service.info)
        return json_response(_model_body(service.info))


def _add_tokenizer(router: APIRouter, service: Service, parsers: Parsers) -> None:
    """Text to token ids and back."""

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        check_model(body.model, service.info)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            formats = parsers.formats(service.tokenizer)
            tokens = await template_prompt(body, toolset(body.tools), formats, service.tokenizer)
        elif body.tools or body.chat_template_kwargs:
            raise RequestError("tools and chat_template_kwargs go with messages", param="messages")
        else:
            special = body.add_special_tokens is not False
            tokens = await encode(service, body.prompt or "", "prompt", add_special=special)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.info.max_total_tokens})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids; special tokens are shown unless asked otherwise."""
        check_model(body.model, service.info)
        check_token_ids(body.tokens, service.info, "tokens")
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})
