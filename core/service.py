"""Core's program interface on an engine of this process; the server's counterpart speaks to another process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .errors import RequestError
from .interfaces import ServiceInfo
from .messages import Event, GenerateCall
from .results import as_exception

if TYPE_CHECKING:
    from .engine import Engine
    from .loop import EngineCore
    from .tokenizer import Tokenizer

Sink = Callable[[Event], None]
T = TypeVar("T")


class LocalService:
    """Implements `phloem.interfaces.Service`. Made by `Engine.service()`; usable from any asyncio loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.info: ServiceInfo = engine.core.info

    async def submit(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Start a call and yield its events. Raises the error of a refused or failed one. Leaving early aborts it."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        left, names = call.params.n, self._engine.names
        if call.call_id in names:
            raise RequestError(f"request id {call.call_id!r} is in use", param="rid")
        # Under a name of its own: the end of an aborted call may still be on its way when its id is used again.
        made = msgspec.structs.replace(call, call_id=f"{call.call_id}~{uuid.uuid4().hex[:8]}")
        names[call.call_id] = made.call_id

        def receive(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        try:
            self._engine.open_call(made, receive)
            while left:
                event = await inbox.get()
                if event.error is not None:
                    raise as_exception(event.error)
                left -= event.finish_reason is not None
                event.call_id = call.call_id
                yield event
        finally:
            del names[call.call_id]
            self._engine.close_call(made.call_id, abort=left > 0)

    async def abort(self, call_id: str) -> bool:
        """Abort exactly this call; False if it is not running."""
        return await self._invoke(lambda core: core.abort_now(self._engine.names.get(call_id, call_id)))

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return await self._invoke(lambda core: core.stats())

    async def flush_cache(self) -> None:
        """Drop everything cached that no request uses."""
        await self._invoke(lambda core: core.flush_cache())

    async def drop_hold(self, name: str) -> bool:
        """Release what a call with this hold left locked; False if nothing is."""
        return await self._invoke(lambda core: core.drop_hold(name))

    async def unpin(self, name: str) -> bool:
        """Let a pinned prefix go; False if there is none of that name."""
        return await self._invoke(lambda core: core.unpin(name))

    async def _invoke(self, function: Callable[[EngineCore], T]) -> T:
        return await asyncio.wrap_future(self._engine.invoke(function))
