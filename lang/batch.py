"""Many runs of one program, a bounded number at a time, on one event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from phloem.errors import RequestError

from .session import MOST_THREADS, session

T = TypeVar("T")
MOST_COROUTINES = 1024  # programs with an `async def` body that run at once by default


class Batch(Generic[T]):
    """Runs `one(item)` per item; `one` raises nothing but cancellation."""

    def __init__(
        self, one: Callable[[Any], Awaitable[T]], items: Sequence[Any], num_threads: int | str, *, threads: bool
    ) -> None:
        """`threads` says whether each run holds a thread. Raises RequestError for a number of threads below 1."""
        if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
            raise RequestError(
                "batch_kwargs must be a list of arguments: of mappings, or of lists", param="batch_kwargs"
            )
        for index, item in enumerate(items):
            if isinstance(item, (str, bytes)) or not isinstance(item, (Mapping, Sequence)):
                raise RequestError(
                    f"batch_kwargs[{index}] is {item!r}",
                    hint="give each run its arguments: a mapping by name, or a list in order",
                    param="batch_kwargs",
                )
        if num_threads == "auto":
            num_threads = MOST_THREADS if threads else MOST_COROUTINES
        if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
            raise RequestError(f'num_threads must be "auto" or at least 1, got {num_threads!r}', param="num_threads")
        self._one, self._items = one, items
        self._width = min(num_threads, len(items))

    async def arun(self, on_done: Callable[[int, T], None] | None = None) -> list[T]:
        """Run all on the present loop; `on_done` gets each when it is done. Cancelling it cancels them."""
        results: dict[int, T] = {}
        waiting = iter(enumerate(self._items))

        async def work() -> None:
            for index, item in waiting:
                results[index] = await self._one(item)
                if on_done is not None:
                    on_done(index, results[index])

        workers = [asyncio.ensure_future(work()) for _ in range(self._width)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [results[index] for index in range(len(self._items))]

    def run(self, *, progress_bar: bool = False, ordered: bool = True) -> Iterator[T]:
        """Yield results as they come, in the order of the items if `ordered`. Leaving early cancels the rest."""
        done: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
        future = session.start(self.arun(lambda index, result: done.put((index, result))))
        future.add_done_callback(lambda _: done.put(None))
        held: dict[int, T] = {}
        following = 0
        try:
            with _progress(len(self._items), progress_bar) as advance:
                for _ in range(len(self._items)):
                    arrived = done.get()
                    if arrived is None:  # ended too early: by an error
                        future.result()
                        return
                    advance()
                    if not ordered:
                        yield arrived[1]
                        continue
                    held[arrived[0]] = arrived[1]
                    while following in held:
                        yield held.pop(following)
                        following += 1
        finally:
            future.cancel()


def _progress(total: int, wanted: bool) -> AbstractContextManager[Callable[[], None]]:
    return _bar(total) if wanted else nullcontext(lambda: None)


def _bar(total: int) -> AbstractContextManager[Callable[[], None]]:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    @contextmanager
    def shown() -> Iterator[Callable[[], None]]:
        with Progress(SpinnerColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("programs", total=total)
            yield lambda: bar.advance(task)

    return shown()
