"""A value on its way: text that grows, and at last a result or an error. What every reader of a program waits on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from phloem.errors import AbortedError


class Cancelled(AbortedError):
    """The program cancelled the branch: what it had not produced is not coming, on purpose."""


class Cell:
    """Written by the interpreter, read from any thread and any event loop.

    Every variable of a state is one, and so is the state's text. Reading costs one lock; waiting costs no thread
    where it is awaited.
    """

    __slots__ = ("_chunks", "_done", "_error", "_lock", "_value", "_watchers", "meta", "owner")

    def __init__(self, owner: asyncio.AbstractEventLoop | None = None) -> None:
        """`owner` is the loop that will write it: waiting in its own thread would never end, and is refused."""
        self.owner = owner
        self.meta: Any = None
        self._chunks: list[str] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    @classmethod
    def of(cls, value: Any) -> Cell:
        """A cell that has its value."""
        cell = cls()
        cell.set(value)
        return cell

    # --- writing

    def push(self, text: str) -> None:
        """More text."""
        with self._lock:
            self._chunks.append(text)
        self._wake()

    def set(self, value: Any, meta: Any = None) -> None:
        """The result. Only the first of `set` and `fail` counts."""
        with self._lock:
            if self._done:
                return
            self._value, self._done = value, True
            self.meta = meta if meta is not None else self.meta
        self._wake()

    def fail(self, error: BaseException) -> None:
        """No result will come: readers raise `error`."""
        with self._lock:
            if self._done:
                return
            self._error, self._done = error, True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    # --- reading

    @property
    def done(self) -> bool:
        """The result or the error is there."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """Why there is no result; None while it is on its way, and where there is one."""
        return self._error

    def text(self) -> str:
        """What was pushed so far."""
        with self._lock:
            if len(self._chunks) > 1:  # joined once, not at every reading
                self._chunks = ["".join(self._chunks)]
            return self._chunks[0] if self._chunks else ""

    def result(self) -> Any:
        """The value of a cell that is done. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self, timeout: float | None = None, *, grown_beyond: int | None = None) -> None:
        """Block until the cell is done, or has more than `grown_beyond` characters of text.

        Raises TimeoutError; RuntimeError where waiting would stop what is waited for.
        """
        if self._ready(grown_beyond):
            return
        self._refuse_on_loop()
        woken = threading.Event()
        while not self._watch(woken.set, grown_beyond):
            if not woken.wait(timeout):
                raise TimeoutError(f"no result within {timeout} s")
            woken.clear()

    async def ready(self, *, grown_beyond: int | None = None) -> None:
        """`wait` for coroutines, on any loop."""
        loop = asyncio.get_running_loop()
        while not self._ready(grown_beyond):
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                _tell(loop, woken)

            if self._watch(wake, grown_beyond):
                return
            await woken.wait()

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value. Raises the cell's error."""
        self.wait(timeout)
        return self.result()

    async def aget(self) -> Any:
        """`get` for coroutines."""
        await self.ready()
        return self.result()

    def pieces(self) -> Iterator[str]:
        """Text as it grows. Raises the cell's error after what came before it."""
        seen = 0
        while True:
            self.wait(grown_beyond=seen)
            done, new = self._done, self.text()[seen:]
            seen += len(new)
            if new:
                yield new
            elif done:
                self.result()
                return

    async def apieces(self) -> AsyncIterator[str]:
        """`pieces` for coroutines."""
        seen = 0
        while True:
            await self.ready(grown_beyond=seen)
            done, new = self._done, self.text()[seen:]
            seen += len(new)
            if new:
                yield new
            elif done:
                self.result()
                return

    def _ready(self, grown_beyond: int | None) -> bool:
        return self._done or (grown_beyond is not None and len(self.text()) > grown_beyond)

    def _watch(self, watcher: Callable[[], None], grown_beyond: int | None) -> bool:
        """Register a watcher of the next change, unless the cell is ready: then True."""
        with self._lock:
            grown = grown_beyond is not None and sum(map(len, self._chunks)) > grown_beyond
            if self._done or grown:
                return True
            self._watchers.append(watcher)
            return False

    def _refuse_on_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is self.owner:
            raise RuntimeError(
                "reading this would block the event loop that the program runs on: "
                'in an async body write `await s.get("name")`, `await s.async_text()` or `async for`'
            )


def _tell(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    """Set an event of a loop from any thread. A loop that is closed has nobody left who waits."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        woken.set()
        return
    try:
        loop.call_soon_threadsafe(woken.set)
    except RuntimeError:
        if not loop.is_closed():
            raise
