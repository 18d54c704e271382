"""Connections belong to the event loop they were made on: one client for each loop that uses a backend."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

Client = TypeVar("Client")
CLOSE_S = 10.0  # longest wait for other loops to close theirs


class PerLoop(Generic[Client]):
    """A client per event loop, made at its first use there. Thread-safe."""

    def __init__(self, make: Callable[[], Client], close: Callable[[Client], Awaitable[None]]) -> None:
        self._make, self._close = make, close
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self) -> Client:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                client = self._clients[loop] = self._make()
            return client

    def start_closing(self) -> list[Future[None]]:
        """Have every client closed, each on its own loop. A loop that has ended took its connections with it."""
        with self._lock:
            clients, self._clients = list(self._clients.items()), WeakKeyDictionary()
        closing = []
        for loop, client in clients:
            if loop.is_running():
                with contextlib.suppress(RuntimeError):  # it ended just now
                    closing.append(asyncio.run_coroutine_threadsafe(self._closed(client), loop))
        return closing

    async def _closed(self, client: Client) -> None:
        await self._close(client)


class Connected:
    """What backends with connections have in common: ways to close them."""

    _clients: PerLoop[Any]

    async def aclose(self) -> None:
        """Close the connections."""
        for closing in self._clients.start_closing():
            await asyncio.wrap_future(closing)

    def close(self) -> None:
        """`aclose` for sync callers. Called on an event loop, it leaves that loop's own connections to it."""
        closing = self._clients.start_closing()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            wait(closing, CLOSE_S)

    def shutdown(self) -> None:
        """`close` under SGLang's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
