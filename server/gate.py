"""The limits in front of a Service: how many calls at once, for how long, and none during a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.constraint import within
from phloem.errors import EngineDeadError, PhloemError, QueueFullError
from phloem.interfaces import Service, ServiceInfo
from phloem.messages import Event, GenerateCall

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer


class RequestTimeoutError(PhloemError):
    """A request ran longer than the server allows."""

    status = 504
    kind = "timeout"


class Gate:
    """A Service around another one; every call of every API passes here.

    `limit` counts choices, running and waiting: beyond it a call is refused at once (429) instead of piling up in
    the model process's inbox. A constraint of more than `max_source` bytes is refused here, as the model process would
    have to read it while others wait for their tokens.
    """

    def __init__(self, inner: Service, *, limit: int, timeout_s: float, max_source: int) -> None:
        self._inner = inner
        self._max_source = max_source
        self._limit = limit
        self._timeout_s = timeout_s
        self._idle = asyncio.Event()
        self._idle.set()
        self.open = 0  # choices in flight
        self.draining = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inner.tokenizer

    @property
    def info(self) -> ServiceInfo:
        """About the engine."""
        return self._inner.info

    async def submit(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        """Run a call within the limits; see Service.submit."""
        call = msgspec.structs.replace(call, params=within(call.params, self._max_source))
        self._admit(call.params.n)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with aclosing(self._inner.submit(call)) as events:
                while True:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(events, None)
                    if event is None:
                        return
                    yield event
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request took longer than {self._timeout_s:g} s and was aborted",
                hint="ask for fewer tokens, or raise server.request_timeout_s",
            ) from None
        finally:
            self._leave(call.params.n)

    async def abort(self, call_id: str) -> bool:
        """Cancel exactly this call."""
        return await self._inner.abort(call_id)

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return await self._inner.stats()

    async def flush_cache(self) -> None:
        """Drop everything cached that no request uses, and all holds."""
        await self._inner.flush_cache()

    async def drop_hold(self, name: str) -> bool:
        """Release what a call with this hold left locked; False if nothing is."""
        return await self._inner.drop_hold(name)

    async def unpin(self, name: str) -> bool:
        """Let a pinned prefix go; False if there is none of that name."""
        return await self._inner.unpin(name)

    async def drain(self, seconds: float) -> bool:
        """Refuse new calls and wait for those in flight; False if some are left after `seconds`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _admit(self, choices: int) -> None:
        if self.draining:
            raise EngineDeadError("the server is shutting down", hint="retry elsewhere, or after the restart")
        if self.open + choices > self._limit:
            raise QueueFullError(
                f"{self.open} requests are running or waiting, the limit is {self._limit}", hint="retry later"
            )
        self.open += choices
        self._idle.clear()

    def _leave(self, choices: int) -> None:
        self.open -= choices
        if self.open == 0:
            self._idle.set()
