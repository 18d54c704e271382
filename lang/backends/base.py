"""What the interpreter asks of a backend. One `Path` per branch of a program; all calls run on one event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phloem.messages import TokenLogprob
from phloem.params import SamplingParams


@dataclass(slots=True)
class Generation:
    """What a `gen` produced. With `n > 1` the lists have one entry per choice and the first joins the state."""

    texts: list[str]
    meta: list[dict[str, Any]] = field(default_factory=list)  # finish_reason, prompt/completion/cached_tokens, ...
    logprobs: list[list[TokenLogprob]] | None = None


@dataclass(slots=True)
class Selection:
    """What a `select` chose, and why: per choice its score under the method and its tokens' log-probabilities."""

    index: int
    choice: str
    scores: list[float]
    token_logprobs: list[list[float]]
    meta: dict[str, Any] = field(default_factory=dict)


class Path(Protocol):
    """One branch's text as the backend holds it. Calls on one path come one after another; paths run side by side.

    `append`, `begin` and `end` cost nothing: text is committed with the next `generate`, `select` or `commit`.
    """

    def append(self, text: str) -> None:
        """Add text."""

    def begin(self, role: str) -> str:
        """Open a message; returns the text that this adds ("" where the backend holds messages, not text)."""

    def end(self, role: str) -> str:
        """Close the message; returns the text that this adds."""

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        """Continue the text; the first choice's text joins it. `on_text` gets deltas of the first choice.

        Raises phloem.errors.PhloemError. Cancelling the task cancels the work.
        """

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """Score the choices as continuations and append the best."""

    def fork(self, count: int) -> list[Path]:
        """Branches that share this path's text from now on, computed or not. Declared to the engine, runs nothing."""

    async def commit(self) -> None:
        """Hand appended text to the engine now, so that its prefill starts."""

    async def close(self) -> None:
        """The branch ends: what it holds is released, what runs is cancelled. Idempotent."""


class Backend(Protocol):
    """Where programs run. Usable from any event loop; thread-safe to share among runs."""

    # Of "fork", "select", "regex", "json_schema", "logprobs", "stop_regex", "vision", ...; with "group", `start` takes
    # a further `group=`: runs that carry the same one wait for each other's prefixes, as the branches of one run do.
    capabilities: frozenset[str]

    def start(self, *, priority: int = 0, salt: str | None = None) -> Path:
        """A new, empty path. One per program run."""

    async def flush_cache(self) -> None:
        """Drop what is cached and not in use."""

    async def info(self) -> dict[str, Any]:
        """What the backend tells about itself: the model's name and, where known, the engine's counters."""

    async def aclose(self) -> None:
        """Release connections; an engine that the backend made is closed with it."""
