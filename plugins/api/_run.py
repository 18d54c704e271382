"""Running calls on a Service for one HTTP request: collect or merge their events, and stop when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Receive

from phloem.errors import AbortedError
from phloem.interfaces import Service
from phloem.messages import Event, GenerateCall, TokenLogprob, Usage

T = TypeVar("T")


@dataclass(slots=True)
class Choice:
    """One finished choice of one call."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    notes: list[str] = field(default_factory=list)  # what was not honoured to the letter, as the request allowed

    def add(self, event: Event) -> None:
        """Take over what an event brings."""
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            self.usage = event.usage or self.usage
            self.notes = event.notes


async def merged(service: Service, calls: Sequence[GenerateCall]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all calls as they come, each with its call's index. The first error ends all; so does closing."""
    if len(calls) == 1:  # the common case needs no second queue and no task
        async with aclosing(service.submit(calls[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()

    async def pump(index: int, call: GenerateCall) -> None:
        try:
            async with aclosing(service.submit(call)) as events:
                async for event in events:
                    queue.put_nowait((index, event))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, call)) for index, call in enumerate(calls)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(service: Service, calls: Sequence[GenerateCall]) -> list[list[Choice]]:
    """Run calls to their ends: per call, its `n` choices."""
    results = [[Choice() for _ in range(call.params.n)] for call in calls]
    async with aclosing(merged(service, calls)) as events:
        async for index, event in events:
            results[index][event.index].add(event)
    return results


def total_usage(results: Sequence[Sequence[Choice]]) -> Usage:
    """Counts of a whole request: each call's prompt once, completions summed."""
    total = Usage()
    for choices in results:
        total.prompt_tokens += choices[0].usage.prompt_tokens
        total.cached_tokens += choices[0].usage.cached_tokens
        total.completion_tokens += sum(choice.usage.completion_tokens for choice in choices)
    return total


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection; to be used once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (Starlette would let it run on)."""
    task, watch = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise AbortedError("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
