"""A run of a program: from its first expression to the release of all that it held."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phloem.errors import AbortedError

from .backends.base import Backend
from .interpreter import Branch
from .sampling import DEFAULT_MAX_TOKENS

# The runs whose bodies the present code is part of; a body may run another program.
_bodies: contextvars.ContextVar[frozenset[Run]] = contextvars.ContextVar("phloem_lang_bodies", default=frozenset())


class Run:
    """One run of a program: its backend, its loop and its branches."""

    def __init__(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        defaults: Mapping[str, Any],
        *,
        stream: bool = False,
        logprob_start: int | None = None,
        **start: Any,
    ) -> None:
        """`defaults` are sampling parameters; `start` goes to `Backend.start` (priority, salt)."""
        self.backend, self.loop, self.stream = backend, loop, stream
        self.defaults = {"max_tokens": DEFAULT_MAX_TOKENS} | dict(defaults)
        self.logprob_start, self.start = logprob_start, start
        self.over = False  # the body has ended: no variable will be added
        self.tasks: set[asyncio.Task[None]] = set()
        self.driver: asyncio.Task[Any] | None = None  # of a stream: a loop holds its tasks weakly
        self.branches: list[Branch] = []
        self.root = Branch(self)

    @property
    def inside(self) -> bool:
        """True for code that this run's body calls: it must not wait for what only the body can still bring about."""
        return self in _bodies.get()

    @contextmanager
    def body(self) -> Iterator[None]:
        """What runs here is the body, until it ends."""
        token = _bodies.set(_bodies.get() | {self})
        try:
            yield
        finally:
            _bodies.reset(token)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function on the loop, at once if this is its thread."""
        try:
            here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            here = False
        if here:
            function()
        else:
            self.loop.call_soon_threadsafe(function)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this run. On the loop."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """`spawn` from any thread."""
        self.call(lambda: self.spawn(work))

    async def finish(self) -> None:
        """End every branch and wait until all is done and released. On the loop."""
        self.over = True
        for branch in list(self.branches):
            branch.end()
        for branch in list(self.branches):  # none can be added any more
            await branch.closed.ready()
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def abort(self, error: BaseException) -> None:
        """Cancel what runs and release everything; what is read from now on raises `error`."""
        self.root.cancel(error)
        for branch in list(self.branches):
            branch.cancel(AbortedError("the program has ended with an error"))
        await self.finish()
