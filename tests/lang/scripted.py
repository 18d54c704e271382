"""A backend that writes what a test tells it to, when the test lets it: for order, errors and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from phloem.errors import RequestError
from phloem.lang.backends.base import Generation, Path, Selection
from phloem.params import SamplingParams


class Scripted:
    """Answers with the number of the generation and its `max_tokens`; "hang" in the text never ends, "fail" fails.

    `events` is what happened, in order; `open` counts the paths that are not closed.
    """

    capabilities = frozenset({"fork", "select"})

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.events: list[str] = []
        self.open = 0
        self.started: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    def start(self, **options: Any) -> Path:
        self.started.append(options)
        return ScriptedPath(self, "")

    async def flush_cache(self) -> None:
        self.events.append("flush")

    async def info(self) -> dict[str, Any]:
        return {"model_name": "scripted"}

    async def aclose(self) -> None:
        pass


class ScriptedPath:
    """Its text, as it would be sent."""

    def __init__(self, backend: Scripted, text: str) -> None:
        self.backend, self.text, self.closed = backend, text, False
        backend.open += 1

    def append(self, text: str) -> None:
        self.text += text

    def begin(self, role: str) -> str:
        self.text += f"<{role}>"
        return f"<{role}>"

    def end(self, role: str) -> str:
        self.text += f"</{role}>"
        return f"</{role}>"

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        backend = self.backend
        backend.running += 1
        backend.most_running = max(backend.most_running, backend.running)
        try:
            await asyncio.sleep(3600 if self.text.endswith("hang") else backend.delay_s)
            if self.text.endswith("fail"):
                raise RequestError("told to fail", param="text")
        except asyncio.CancelledError:
            backend.events.append("cancelled")
            raise
        finally:
            backend.running -= 1
        texts = [f"[{i}:{params.max_tokens}]" for i in range(params.n)]
        if on_text is not None:
            for char in texts[0]:
                on_text(char)
                await asyncio.sleep(0)
        self.text += texts[0]
        backend.events.append(self.text)
        return Generation(texts, [{"finish_reason": "length", "prompt": len(self.text)} for _ in texts])

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        best = max(range(len(choices)), key=lambda i: len(choices[i]))
        self.text += choices[best]
        return Selection(best, choices[best], [-1.0] * len(choices), [[-1.0]] * len(choices))

    def fork(self, count: int) -> list[Path]:
        return [ScriptedPath(self.backend, self.text) for _ in range(count)]

    async def commit(self) -> None:
        self.backend.events.append(f"commit {self.text}")

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.backend.open -= 1
