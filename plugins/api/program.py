"""Programs: POST /v1/programs and what hangs on it. A state's text stays in the server between requests.

What a client appends is committed lazily: nothing runs until it generates or selects. Forks share all that is computed
before them, and every state's path stays held in the engine until its next operation (docs/programs.md).
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from phloem.interfaces import PluginContext, Service

from ._json import JsonRoute
from ._program_bodies import AppendBody, DeleteBody, ForkBody, GenerateBody, ProgramBody, SelectBody
from ._program_operations import Operations
from ._program_run import Runner
from ._program_store import Limits, State, Store
from ._run import unless_gone
from ._sse import STREAMS, json_response


class ProgramApi:
    """Kind `api`: program states on the server, for clients that go on from where they were."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        """How many programs are kept, and how long."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        most: int = Field(default=4096, ge=1)
        """Programs that may exist at once; one more is refused with 429."""
        idle_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
        """Seconds without use after which a program is forgotten, unless its maker says otherwise."""
        max_idle_s: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
        """The most seconds that its maker may say."""

        @model_validator(mode="after")
        def _in_order(self) -> ProgramApi.Options:
            if self.idle_s > self.max_idle_s:
                raise ValueError(f"idle_s ({self.idle_s:g}) is above max_idle_s ({self.max_idle_s:g})")
            return self

    def __init__(self, options: Options, context: PluginContext) -> None:
        del context
        self._limits = Limits(options.most, options.idle_s, options.max_idle_s)

    def router(self, service: Service) -> APIRouter:
        """The routes."""
        router = APIRouter(tags=["programs"], prefix="/v1/programs", route_class=JsonRoute)
        store = Store(service, self._limits)
        operations = Operations(Runner(service, store), store)
        _add_states(router, service, store, operations)
        _add_operations(router, service, store, operations)
        return router


def _add_states(router: APIRouter, service: Service, store: Store, operations: Operations) -> None:
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
                "most_states": store.limits.most,
                "max_total_tokens": service.info.max_total_tokens,
                "eos_token_ids": list(service.info.spec.eos_token_ids),
                "special_tokens": {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)},
                "named_tokens": tokenizer.special_tokens,
                "chat_template": tokenizer.chat_template,
            }
        )

    @router.post("", responses=STREAMS)
    async def make(body: ProgramBody, request: Request) -> Response:
        """A new program. Runs nothing but the first operation, if one is given; one that fails leaves no program."""
        body.check(service, required=False)
        return await operations.make(body, request)

    @router.post("/delete")
    async def delete_several(body: DeleteBody) -> Response:
        """Forget programs; ids that are not known are passed over."""
        return json_response({"deleted": await store.delete_several(body.ids)})

    @router.get("/{program}")
    async def show(program: str) -> Response:
        """A program's text and variables as they are now."""
        state = await store.find(program)
        return json_response(_shown(state))

    @router.post("/{program}/fork")
    async def fork(program: str, body: ForkBody) -> Response:
        """Programs that begin with what this one has. Runs nothing."""
        body.check()
        return json_response(await operations.result(await store.find(program), body))

    @router.delete("/{program}")
    async def delete(program: str) -> Response:
        """Forget a program: what runs of it is aborted, and what it holds in the cache is released."""
        await store.delete(await store.find(program))
        return json_response({"ok": True})


def _add_operations(router: APIRouter, service: Service, store: Store, operations: Operations) -> None:
    """Routes that make a text grow. Those of one program run in the order in which they come."""

    @router.post("/{program}/append")
    async def append(program: str, body: AppendBody) -> Response:
        """Add text or tokens. Runs nothing."""
        body.check(service, required=True)
        state = await store.find(program)
        async with state.turn():
            state.text.add(service.tokenizer, body.added, body.token_ids)
            return json_response({"length": len(state.text.whole)})

    @router.post("/{program}/generate", responses=STREAMS)
    async def generate(program: str, body: GenerateBody, request: Request) -> Response:
        """Continue the text."""
        return await operations.generate(await store.find(program), body, request)

    @router.post("/{program}/select")
    async def select(program: str, body: SelectBody, request: Request) -> Response:
        """Choose how the text continues; all choices are scored in one forward pass."""
        body.check()
        work = operations.result(await store.find(program), body)
        return json_response(await unless_gone(request.receive, work))


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
