"""Operations of programs as answers to requests: of a program that is there, or together with the making of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response

from phloem.choosing import METHODS

from ._program_bodies import ForkBody, GenerateBody, ProgramBody, SelectBody
from ._program_run import Runner
from ._program_store import State, Store
from ._run import unless_gone
from ._sampling import native_params
from ._sse import DONE, json_response, stream

Operation = GenerateBody | SelectBody | ForkBody


class Operations:
    """What the routes do with a program's state. `shown` of each is what its answer says beside its own."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self._runner, self._store = runner, store

    async def make(self, body: ProgramBody, request: Request) -> Response:
        """A new program, with its first text and the answer of its first operation. One that fails leaves none."""
        first = body.first
        async with self._new(body) as state:
            shown = {"id": state.id, "expires_s": state.idle_s}
            if first is None:
                return json_response(shown)
            if isinstance(first, GenerateBody) and first.stream:
                return await stream(request, self._unless_it_fails(state, self._chunks(state, first, shown)))
            return json_response(shown | await unless_gone(request.receive, self.result(state, first)))

    async def generate(self, state: State, body: GenerateBody, request: Request) -> Response:
        """Continue the text of a program."""
        if body.stream:
            return await stream(request, self._chunks(state, body))
        return json_response(await unless_gone(request.receive, self.result(state, body)))

    async def result(self, state: State, body: Operation) -> dict[str, Any]:
        """The whole answer of an operation whose body has been checked."""
        if isinstance(body, GenerateBody):
            return await self._runner.generate(state, native_params(body.sampling_params or {}), body.way)
        if isinstance(body, SelectBody):
            method = METHODS[0] if body.method is None else body.method
            temperature = body.temperature or 0.0
            return await self._runner.select(state, body.choices, method, body.way, temperature=temperature)
        async with state.turn(body.added):
            return {"ids": [branch.id for branch in await self._store.fork(state, body.n)]}

    def _chunks(
        self, state: State, body: GenerateBody, shown: dict[str, Any] | None = None
    ) -> AsyncGenerator[bytes, None]:
        return self._runner.chunks(state, native_params(body.sampling_params or {}), body.way, shown or {})

    @asynccontextmanager
    async def _new(self, body: ProgramBody) -> AsyncIterator[State]:
        """A new state with its first text; it is forgotten if what is done with it fails."""
        state = await self._store.make(
            body.id, salt=body.salt, priority=body.priority or 0, group=body.group, idle_s=body.idle_s
        )
        try:
            state.text.add(self._runner.tokenizer, body.added, body.token_ids)
            yield state
        except BaseException:
            await self._store.delete(state)
            raise

    async def _unless_it_fails(self, state: State, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """A stream; the state is forgotten if it breaks off, by an error or because the client left."""
        whole = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    whole = chunk == DONE
                    yield chunk
        finally:
            if not whole:
                await self._store.delete(state)
