"""What all programs of a process share: the default backend, the event loop of sync callers, the threads of bodies.

One event loop, on a thread of its own, carries the work of every program that sync code runs; programs that are
awaited run on their caller's loop. A plain-function body needs a thread while it runs. A sync `run` uses its caller's;
streams, batches and awaited runs take one of a bounded pool. A body may itself start programs and wait for them, so
these take a thread of the next pool: however deep runs are nested, a body that waits never holds the thread that what
it waits for needs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from phloem.errors import ConfigError

from .backends.base import Backend

T = TypeVar("T")
MOST_THREADS = max(96, 16 * (os.cpu_count() or 1))  # of a pool: bodies of one depth that run at once

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("phloem_lang_depth", default=0)


class Session:
    """Made once, in this module. Thread-safe."""

    def __init__(self) -> None:
        self.default_backend: Backend | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pools: list[ThreadPoolExecutor] = []

    def backend(self, given: Any) -> Backend:
        """The backend of a run: the one given (an Engine of phloem counts), or the default. Raises ConfigError."""
        chosen = given if given is not None else self.default_backend
        if chosen is None:
            raise ConfigError(
                "no backend to run on",
                hint='set_default_backend(Engine("smollm2-135m")), or run(..., backend=...)',
            )
        return as_backend(chosen)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of sync callers. Its thread starts with the first use and ends with the process."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="phloem-lang", daemon=True).start()
            return self._loop

    @property
    def on_loop(self) -> bool:
        """True in the thread of that loop, where nothing may wait for it."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, in the caller's context: a body's depth goes with it."""
        made: Future[T] = Future()

        def begin() -> None:
            task = asyncio.ensure_future(work)
            made.add_done_callback(lambda done: self._stop_if_cancelled(done, task))
            task.add_done_callback(lambda done: _settle(made, done))

        self.loop.call_soon_threadsafe(begin, context=contextvars.copy_context())
        return made

    def refuse_on_loop(self) -> None:
        """Raise RuntimeError in an async body of a sync run: who waits there waits for itself."""
        if self.on_loop:
            raise RuntimeError(
                "a sync call inside an async body would block the loop that it needs: write `await program.arun(...)`"
            )

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it. An interrupt cancels it. Raises RuntimeError on the loop."""
        try:
            self.refuse_on_loop()
        except RuntimeError:
            work.close()
            raise
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def thread(self, body: Callable[[], T]) -> Future[T]:
        """Run a body on a thread of the pool that its depth calls for."""
        depth = _depth.get()
        context = contextvars.copy_context()
        context.run(_depth.set, depth + 1)
        with self._lock:
            while len(self._pools) <= depth:
                name = f"phloem-body-{len(self._pools)}"
                self._pools.append(ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=name))
            pool = self._pools[depth]
        return pool.submit(context.run, body)

    def _stop_if_cancelled(self, done: Future[Any], task: asyncio.Future[Any]) -> None:
        if done.cancelled() and not task.done():
            self.loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Stop the loop at the process's end. Bodies have ended by then: the interpreter waits for their threads."""
        with self._lock:
            if self._loop is not None and self._loop.is_running():
                self._loop.call_soon_threadsafe(self._loop.stop)


def as_backend(value: Any) -> Backend:
    """A backend of what a program may name as one: a backend, a phloem Engine, or what has one as `endpoint`."""
    from phloem.engine import Engine

    if isinstance(value, Engine):
        from .backends.local import LocalBackend

        return LocalBackend.of(value)
    value = getattr(value, "endpoint", value)
    if not callable(getattr(value, "start", None)) or not hasattr(value, "capabilities"):
        raise ConfigError(
            f"{type(value).__name__} is no backend",
            hint="give Engine(...), RuntimeEndpoint(url) or OpenAI(...) of phloem.lang, or a phloem.Engine",
        )
    found: Backend = value
    return found


def _settle(made: Future[T], task: asyncio.Future[T]) -> None:
    if made.cancelled() or not made.set_running_or_notify_cancel():
        return
    if task.cancelled():
        made.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        made.set_exception(error)
    else:
        made.set_result(task.result())


session = Session()
atexit.register(session.close)
