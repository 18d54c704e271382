"""Connections belong to the event loop they were made on: one client for each loop that uses a backend."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Client = TypeVar("Client")


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

    async def aclose(self) -> None:
        """Close every client, each on its own loop; those whose loop has ended took their connections with them."""
        with self._lock:
            clients, self._clients = list(self._clients.items()), WeakKeyDictionary()
        here = asyncio.get_running_loop()
        for loop, client in clients:
            if loop is here:
                await self._close(client)
            elif loop.is_running():
                with contextlib.suppress(RuntimeError):  # it stopped just now
                    closing = asyncio.run_coroutine_threadsafe(_wait(self._close(client)), loop)
                    await asyncio.wrap_future(closing)


async def _wait(closing: Awaitable[None]) -> None:
    await closing
