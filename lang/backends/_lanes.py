"""Many requests at once, each on a client with a connection of its own.

httpx's pool looks at all of its connections for every request that comes and goes: with 64 of them that took three
quarters of a program's time in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

KEPT = 256  # idle connections of one loop


class Lanes:
    """The clients of one event loop: one for each request that runs, kept for the next ones."""

    def __init__(self, make: Callable[[], httpx.AsyncClient], most: int) -> None:
        """`make` makes a client for one request at a time; requests beyond `most` at once wait."""
        self._make = make
        self._free: list[httpx.AsyncClient] = []  # the last one used is the first one used again
        self._room = asyncio.Semaphore(most)
        self.is_closed = False

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client, for one request."""
        async with self._room:
            client = self._free.pop() if self._free else self._make()
            try:
                yield client
            finally:
                if self.is_closed or len(self._free) >= KEPT:
                    await client.aclose()
                else:
                    self._free.append(client)

    async def aclose(self) -> None:
        """Close all that is idle now; what is in use is closed when it is not any more."""
        self.is_closed = True
        free, self._free = self._free, []
        for client in free:
            await client.aclose()
