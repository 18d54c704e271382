"""What the library returns: results of finished calls and deltas of running ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import errors
from .messages import ErrorInfo, Event, TokenLogprob, Usage


@dataclass(slots=True)
class Output:
    """One choice of a call."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop token or string that matched
    logprobs: list[TokenLogprob] | None = None  # one per token of token_ids, where asked for
    notes: list[str] = field(default_factory=list)  # what was not honoured to the letter, as the request allowed

    def add(self, event: Event) -> None:
        """Fold one event of this choice in."""
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.notes = event.finish_reason, event.stop_reason, event.notes


@dataclass(slots=True)
class Result:
    """A call's result: `outputs` holds all choices, the other fields are the first choice's.

    Yielded by `stream` too: then the fields hold what is new, and `finish_reason` is set on a choice's last delta.
    """

    outputs: list[Output]
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token, which nothing precedes
    usage: Usage = field(default_factory=Usage)
    scores: list[list[float]] | None = None  # of a scoring call

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """The first choice's finish reason."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The first choice's stop reason."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The first choice's logprobs."""
        return self.outputs[0].logprobs


class Collector:
    """Folds a call's events into its Result; `done` once every choice has finished."""

    def __init__(self, prompt: Sequence[int], choices: int) -> None:
        self.result = Result([Output(i) for i in range(choices)], list(prompt))
        self._open = choices

    @property
    def done(self) -> bool:
        """All choices are finished."""
        return self._open == 0

    def add(self, event: Event) -> None:
        """Fold one event in. Raises the PhloemError it carries, if any."""
        if event.error is not None:
            raise as_exception(event.error)
        self.result.outputs[event.index].add(event)
        usage = self.result.usage
        if event.prompt_logprobs is not None and self.result.prompt_logprobs is None:
            self.result.prompt_logprobs = event.prompt_logprobs
        self.result.scores = event.scores or self.result.scores
        if event.usage is not None:
            usage.prompt_tokens = event.usage.prompt_tokens
            usage.completion_tokens += event.usage.completion_tokens
            if event.index == 0:
                usage.cached_tokens = event.usage.cached_tokens
        if event.finish_reason is not None:
            self._open -= 1


def as_exception(info: ErrorInfo) -> errors.PhloemError:
    """The exception an ErrorInfo was made from."""
    refused = (errors.RequestError, errors.ContextError, errors.QueueFullError, errors.AbortedError)
    classes = (*refused, errors.StepError, errors.EngineDeadError)
    found: type[errors.PhloemError] = next((cls for cls in classes if cls.kind == info.kind), errors.PhloemError)
    error = found(info.message, hint=info.hint, param=info.param)
    error.status = info.status
    return error
