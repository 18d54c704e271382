"""What a program of the benchmark is: the same work written in the language, and written as calls of an API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Case = dict[str, Any]  # a program's arguments
Messages = list[dict[str, str]]


class Calls(Protocol):
    """Calls of a text API, each with its whole prompt. Greedy."""

    async def complete(
        self,
        prompt: str | Messages,
        max_tokens: int,
        *,
        stop: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """Continue a text, or answer messages. Without stop and schema exactly `max_tokens` are written."""
        ...

    async def choose(self, prompt: str, choices: Sequence[str]) -> str:
        """The choice with the highest mean log-probability of its tokens, each scored by a call of its own."""
        ...


@dataclass(frozen=True)
class Program:
    """`language` is a phloem.lang function, `plain` the same with calls; both return what was written, in order."""

    name: str
    what: str
    cases: Callable[[int], list[Case]]  # so many sets of arguments, always the same
    language: Any
    plain: Callable[..., Awaitable[list[str]]]  # (calls, **case)
    size: int  # cases of a run, by default
    fork_heavy: bool = False
