"""The OpenAI-compatible routes: completions, chat completions, models, tokenize, detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Service, ServiceInfo
from phloem.messages import GenerateCall
from phloem.params import SamplingParams

from ._chat import ChatAnswer
from ._completions import CompletionAnswer
from ._params import (
    chat_params,
    chat_prompt,
    check_model,
    check_token_ids,
    completion_params,
    completion_prompts,
    encode,
    new_id,
)
from ._run import collect, unless_gone
from ._schema import ChatBody, CompletionBody, DetokenizeBody, Sampling, TokenizeBody
from ._sse import STREAMS, json_response, stream


class OpenAIApi:
    """Kind `api`: what OpenAI's clients speak. A parameter that cannot be honoured is refused by name."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        del options, context

    def router(self, service: Service) -> APIRouter:
        """All routes of this API."""
        router = APIRouter(tags=["openai"])
        _add_generation(router, service)
        _add_models(router, service)
        _add_tokenizer(router, service)
        return router


def _call(call_id: str, prompt: list[int], params: SamplingParams, body: Sampling) -> GenerateCall:
    """A call of one prompt with what the body says beyond sampling."""
    return GenerateCall(
        call_id=call_id,
        prompt=prompt,
        params=params,
        priority=body.priority or 0,
        salt=body.cache_salt,
        stream=bool(body.stream),
    )


def _usage_wanted(body: Sampling) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _completion_answer(body: CompletionBody, service: Service) -> CompletionAnswer:
    """Check, tokenise and pack a completion request."""
    check_model(body.model, service.info)
    params = completion_params(body)
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
        calls=[_call(one, prompt, params, body) for one, prompt in zip(ids, prompts, strict=True)],
        prompts=echoed,
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        output=body.max_tokens != 0,
        include_usage=_usage_wanted(body),
    )


def _add_generation(router: APIRouter, service: Service) -> None:
    """The two routes that generate."""

    @router.post("/v1/completions", responses=STREAMS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        answer = await _completion_answer(body, service)
        if body.stream:
            return await stream(request, answer.chunks())
        return json_response(answer.whole(await unless_gone(request.receive, collect(service, answer.calls))))

    @router.post("/v1/chat/completions", responses=STREAMS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, through the model's own template."""
        check_model(body.model, service.info)
        params = chat_params(body)
        prompt = await chat_prompt(body.messages, service)
        request_id = new_id("chatcmpl")
        call = _call(request_id, prompt, params, body)
        answer = ChatAnswer(request_id, service, call, _usage_wanted(body))
        if body.stream:
            return await stream(request, answer.chunks())
        return json_response(answer.whole(await unless_gone(request.receive, collect(service, [call]))))


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


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    """Text to token ids and back."""

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        check_model(body.model, service.info)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = await chat_prompt(body.messages, service)
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
