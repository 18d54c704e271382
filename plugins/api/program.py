"""Programs: POST /v1/programs and what hangs on it. A state's text stays in the server between requests.

What a client appends is committed lazily: nothing runs until it generates or selects. Forks share all that is computed
before them, and every state's path stays held in the engine until its next operation (docs/programs.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from phloem.choosing import METHODS
from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Service

from ._body import Body
from ._json import JsonRoute
from ._params import check_token_ids
from ._program_run import Runner, Way
from ._program_store import MAX_STATES, State, Store
from ._program_text import Added
from ._run import unless_gone
from ._sampling import FIELDS, RENAMED, native_params
from ._schema import Int, TokenId
from ._sse import STREAMS, json_response, stream

MAX_CHOICES = 1024


class TextBody(Body):
    """What an operation appends before anything else. It stays if the operation succeeds."""

    text: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="false: the tokenizer puts nothing before the text. Counts for a program's first text only."
    )


class AppendBody(TextBody):
    """POST /v1/programs/{id}/append: one of text and token_ids."""

    token_ids: list[TokenId] | None = None


class ProgramBody(AppendBody):
    """POST /v1/programs: what calls of the program have in common, and its first text if there is one yet."""

    salt: str | None = None
    priority: Int | None = None
    group: str | None = Field(
        None, description="Programs of one group wait for each other's prefixes, as the forks of one program do."
    )
    idle_s: float | Int | None = Field(None, description="Seconds without use after which the program is forgotten.")


class GenerateBody(TextBody):
    """POST /v1/programs/{id}/generate."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED

    name: str | None = Field(None, description="The variable that keeps the answer.")
    sampling_params: dict[str, Any] | None = Field(None, description=FIELDS)
    stream: bool | None = None
    append: bool | None = Field(None, description="false: the answer does not join the text.")


class SelectBody(TextBody):
    """POST /v1/programs/{id}/select."""

    choices: list[str]
    method: str | None = Field(None, description="One of: " + ", ".join(METHODS))
    temperature: float | Int | None = Field(None, description="0: the best choice; above, one drawn by its score.")
    name: str | None = Field(None, description="The variable that keeps the choice.")
    append: bool | None = Field(None, description="false: the choice does not join the text.")


class ForkBody(TextBody):
    """POST /v1/programs/{id}/fork."""

    n: Int


class ProgramApi:
    """Kind `api`: program states on the server, for clients that go on from where they were."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        del options, context

    def router(self, service: Service) -> APIRouter:
        """The routes."""
        router = APIRouter(tags=["programs"], prefix="/v1/programs", route_class=JsonRoute)
        store = Store(service)
        _add_states(router, service, store)
        _add_operations(router, service, store)
        return router


def _add_states(router: APIRouter, service: Service, store: Store) -> None:
    """Routes that make, show, fork and delete states."""

    @router.get("")
    async def about() -> Response:
        """The model, as a client needs it to write in its chat format; how many programs there are."""
        await store.sweep()
        tokenizer = service.tokenizer
        return json_response(
            {
                "model": service.info.model_name,
                "states": len(store),
                "most_states": MAX_STATES,
                "max_total_tokens": service.info.max_total_tokens,
                "eos_token_ids": list(service.info.spec.eos_token_ids),
                "special_tokens": {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)},
                "named_tokens": tokenizer.special_tokens,
                "chat_template": tokenizer.chat_template,
            }
        )

    @router.post("")
    async def make(body: ProgramBody) -> Response:
        """A new program. Runs nothing."""
        _check_text(body, service, required=False)
        state = await store.make(salt=body.salt, priority=body.priority or 0, group=body.group, idle_s=body.idle_s)
        _append(state, body, service)
        return json_response({"id": state.id, "expires_s": state.idle_s})

    @router.get("/{program}")
    async def show(program: str) -> Response:
        """A program's text and variables as they are now."""
        state = await store.find(program)
        return json_response(_shown(state))

    @router.post("/{program}/fork")
    async def fork(program: str, body: ForkBody) -> Response:
        """Programs that begin with what this one has. Runs nothing."""
        if body.n < 1:
            raise RequestError(f"n must be at least 1, got {body.n}", param="n")
        added = _added(body)
        state = await store.find(program)
        async with state.turn(added):
            return json_response({"ids": [branch.id for branch in await store.fork(state, body.n)]})

    @router.delete("/{program}")
    async def delete(program: str) -> Response:
        """Forget a program: what runs of it is aborted, and what it holds in the cache is released."""
        await store.delete(await store.find(program))
        return json_response({"ok": True})


def _add_operations(router: APIRouter, service: Service, store: Store) -> None:
    """Routes that make a text grow. Those of one program run in the order in which they come."""
    runner = Runner(service, store)

    @router.post("/{program}/append")
    async def append(program: str, body: AppendBody) -> Response:
        """Add text or tokens. Runs nothing."""
        _check_text(body, service, required=True)
        state = await store.find(program)
        async with state.turn():
            _append(state, body, service)
            return json_response({"length": len(state.text.whole)})

    @router.post("/{program}/generate", responses=STREAMS)
    async def generate(program: str, body: GenerateBody, request: Request) -> Response:
        """Continue the text."""
        params = native_params(body.sampling_params or {})
        way = Way(_added(body), body.append is not False, body.name)
        state = await store.find(program)
        if body.stream:
            return await stream(request, runner.chunks(state, params, way))
        return json_response(await unless_gone(request.receive, runner.generate(state, params, way)))

    @router.post("/{program}/select")
    async def select(program: str, body: SelectBody, request: Request) -> Response:
        """Choose how the text continues; all choices are scored in one forward pass."""
        if not 0 < len(body.choices) <= MAX_CHOICES:
            problem = f"choices must have 1 to {MAX_CHOICES} entries, got {len(body.choices)}"
            raise RequestError(problem, param="choices")
        temperature = body.temperature or 0.0
        if not 0 <= temperature <= 100:
            raise RequestError(f"temperature must be in [0, 100], got {temperature:g}", param="temperature")
        way = Way(_added(body), body.append is not False, body.name)
        method = METHODS[0] if body.method is None else body.method
        state = await store.find(program)
        work = runner.select(state, body.choices, method, way, temperature=temperature)
        return json_response(await unless_gone(request.receive, work))


def _check_text(body: AppendBody, service: Service, *, required: bool) -> None:
    """Refuse what cannot be appended, before anything is made or waited for."""
    if body.text is not None and body.token_ids is not None:
        raise RequestError("text and token_ids are given together", hint="give one of them", param="token_ids")
    if required and body.text is None and body.token_ids is None:
        raise RequestError("give text or token_ids", param="text")
    _added(body)
    check_token_ids(body.token_ids or [], service.info, "token_ids")


def _added(body: TextBody) -> Added:
    """The text that a body brings. Raises RequestError for what is not Unicode."""
    text = body.text or ""
    bad = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
    if bad is not None:
        raise RequestError(f"the text has a lone surrogate (U+{ord(bad):04X})", param="text")
    return Added(text, body.add_special_tokens is False)


def _append(state: State, body: AppendBody, service: Service) -> None:
    if body.text:
        state.text.append(body.text, raw=body.add_special_tokens is False)
    elif body.token_ids:
        state.text.append_tokens(service.tokenizer, body.token_ids)


def _shown(state: State) -> dict[str, Any]:
    return {
        "id": state.id,
        "text": state.text.whole,
        "token_ids": state.text.tokens,
        "uncommitted": state.text.tail,
        "variables": state.variables,
        "busy": state.turns > 0,
        "idle_s": state.idle_s,
        "expires_s": max(0.0, state.used_s + state.idle_s - time.monotonic()),
    }
