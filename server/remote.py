"""The Service that API plugins see in the HTTP process: calls go to the model process, events come back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from phloem.errors import EngineDeadError, PhloemError, RequestError
from phloem.interfaces import ServiceInfo
from phloem.messages import Event, GenerateCall
from phloem.results import as_exception

from .wire import Abort, Ask, Beat, Command, Events, Message, Ready, Reply, Submit, encode

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

Send = Callable[[bytes], None]


class RemoteService:
    """Implements `phloem.interfaces.Service`. Lives on one event loop; the supervisor links it to each new process."""

    def __init__(self) -> None:
        self.ready: Ready | None = None  # of the latest process; stays known while the next one starts
        self.beat: Beat | None = None
        self._tokenizer: Tokenizer | None = None
        self._send: Send | None = None
        self._down = "the model is still loading"
        self._calls: dict[str, asyncio.Queue[Event | PhloemError]] = {}  # by the id that travels
        self._sent_as: dict[str, str] = {}  # id of each open call -> the id that travels
        self._left: dict[str, int] = {}  # aborted calls whose end is still on its way -> choices that have not ended
        self._asks: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count()

    # --- Service

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built in this process. Raises EngineDeadError before the model is loaded."""
        if self._tokenizer is None:
            raise self._dead()
        return self._tokenizer

    @property
    def info(self) -> ServiceInfo:
        """About the engine. Raises EngineDeadError before the model is loaded."""
        if self.ready is None:
            raise self._dead()
        return self.ready.info

    async def submit(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        """Run a call; see Service.submit. Closing the generator aborts it."""
        if call.call_id in self._sent_as:
            raise RequestError(f"request id '{call.call_id[:80]}' is in use", param="rid")
        sent_as = call.call_id
        if sent_as in self._left:  # what is still to come under this name is not for this call
            sent_as = f"{sent_as}~{next(self._tickets)}"
        self._post(Submit(msgspec.structs.replace(call, call_id=sent_as)))
        queue: asyncio.Queue[Event | PhloemError] = asyncio.Queue()
        self._calls[sent_as] = queue
        self._sent_as[call.call_id] = sent_as
        left = call.params.n
        try:
            while left:
                event = await queue.get()
                left = _still_open(left, event)
                if isinstance(event, PhloemError):
                    raise event
                if event.error is not None:
                    raise as_exception(event.error)
                event.call_id = call.call_id
                yield event
        finally:
            del self._sent_as[call.call_id], self._calls[sent_as]
            while not queue.empty():
                left = _still_open(left, queue.get_nowait())
            if left and self._send is not None:
                self._left[sent_as] = left
                self._send(encode(Abort(sent_as)))

    async def abort(self, call_id: str) -> bool:
        """Cancel exactly this call; its stream ends with finish_reason "abort"."""
        if call_id not in self._sent_as:
            return False
        self._post(Abort(self._sent_as[call_id]))
        return True

    async def stats(self) -> dict[str, Any]:
        """The engine's counters, taken between two steps."""
        value: dict[str, Any] = await self._ask("stats")
        return value

    async def flush_cache(self) -> None:
        """Drop everything cached that no request uses, and all holds."""
        await self._ask("flush_cache")

    async def drop_hold(self, name: str) -> bool:
        """Release what a call with this hold left locked; False if nothing is."""
        dropped: bool = await self._ask("drop_hold", name)
        return dropped

    async def unpin(self, name: str) -> bool:
        """Let a pinned prefix go; False if there is none of that name."""
        dropped: bool = await self._ask("unpin", name)
        return dropped

    # --- the supervisor's side

    def connect(self, send: Send) -> None:
        """A new process is there; `send` queues bytes for it."""
        self._send = send
        self.beat = Beat(0, 0.0, {})

    def disconnect(self, why: str) -> None:
        """The process is gone: everything in flight fails now, everything new until the next `connect`."""
        self._send, self._down = None, why
        for queue in self._calls.values():
            queue.put_nowait(self._dead())
        for future in self._asks.values():
            if not future.done():
                future.set_exception(self._dead())
        self._asks.clear()
        self._left.clear()

    def fail_all(self, error: PhloemError) -> None:
        """End every call that still runs, at the end of a drain."""
        for call_id, queue in self._calls.items():
            queue.put_nowait(error)
            if self._send is not None:
                self._send(encode(Abort(call_id)))

    def receive(self, message: Message) -> None:
        """Distribute what the process says."""
        if isinstance(message, Events):
            for event in message.events:
                queue = self._calls.get(event.call_id)
                if queue is not None:
                    queue.put_nowait(event)
                elif left := _still_open(self._left.pop(event.call_id, 0), event):
                    self._left[event.call_id] = left
        elif isinstance(message, Beat):
            self.beat = message
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Ready):
            if self.ready is None or self.ready.tokenizer != message.tokenizer:  # reading a large one takes seconds
                from phloem.tokenizer import Tokenizer

                self._tokenizer = Tokenizer(message.tokenizer)
            self.ready = message

    def _answer(self, reply: Reply) -> None:
        future = self._asks.pop(reply.ticket, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(as_exception(reply.error))
        else:
            future.set_result(reply.value)

    async def _ask(self, what: Literal["stats", "flush_cache", "drop_hold", "unpin"], *arguments: str) -> Any:
        ticket = next(self._tickets)
        self._post(Ask(ticket, what, list(arguments)))
        future = self._asks[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._asks.pop(ticket, None)

    def _post(self, command: Command) -> None:
        """Queue a command. Raises EngineDeadError without a process, RequestError for what cannot be packed."""
        if self._send is None:
            raise self._dead()
        try:
            data = encode(command)
        except UnicodeEncodeError:
            raise RequestError("the request contains text that is not valid Unicode (a lone surrogate)") from None
        except (OverflowError, TypeError, RecursionError) as error:
            raise RequestError(f"the request cannot be passed on: {error}") from None
        self._send(data)

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(self._down, hint="retry in a few seconds")


def _still_open(choices: int, event: Event | PhloemError) -> int:
    """Choices that go on after an event; a refused or lost call has none, whatever its number."""
    if isinstance(event, PhloemError) or (event.error is not None and event.usage is None):
        return 0
    return max(0, choices - (event.finish_reason is not None))
