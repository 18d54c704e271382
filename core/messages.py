"""What crosses the boundary between a caller (library, HTTP shell) and the loop: calls in, events out.

All are msgspec structs, so the same objects travel in-process and, as msgpack, between processes.
"""

from __future__ import annotations

import msgspec

from .params import SamplingParams


class GenerateCall(msgspec.Struct, kw_only=True):
    """One call: a prompt, and `params.n` independent choices continuing it, or `score`."""

    call_id: str
    prompt: list[int]  # token ids, at least one
    params: SamplingParams
    priority: int = 0  # higher runs earlier, under policies that look at it
    salt: str | None = None  # namespace of the cache; calls with different salts never share state
    adapter: str | None = None
    routing_key: str | None = None
    score: list[list[int]] | None = None  # continuations, each at least one token: nothing is generated
    group: str | None = None  # calls of one program: they wait for each other's prefixes to the last token
    hold: str | None = None  # the computed path stays locked under this name when the call has ended
    hold_idle_s: float | None = None  # seconds without use after which it ends; None: `schedule.hold_idle_s`, the most
    pin: str | None = None  # the prompt stays locked under this name until it is unpinned, or the call is refused
    stream: bool = True  # False: one event per choice, at its end
    arrival_s: float = 0.0  # time.monotonic() at submission; 0: filled in by the loop


def pin_call(
    call_id: str,
    name: str,
    prompt: list[int],
    *,
    salt: str | None = None,
    adapter: str | None = None,
    routing_key: str | None = None,
    priority: int = 0,
) -> GenerateCall:
    """A call that computes a prompt, as far as it is not cached, and pins it. It writes one token, for nobody."""
    params = SamplingParams(max_tokens=1, temperature=0)
    call = GenerateCall(call_id=call_id, prompt=prompt, params=params, pin=name, stream=False)
    call.salt, call.adapter, call.routing_key, call.priority = salt, adapter, routing_key, priority
    return call


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability of one token, and the best alternatives at its position, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one call; with n > 1 the prompt is counted once and completions are summed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the cache at the first choice's admission


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Progress of one choice of a call. `finish_reason` marks its last event; the call ends with its last choice.

    `text` is safe to show: it never ends inside a character nor inside what may become a stop string.
    """

    call_id: str
    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # on a choice's first event
    scores: list[list[float]] | None = None  # of `GenerateCall.score`: raw log-probabilities, one per token
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop token or string that matched
    usage: Usage | None = None  # with finish_reason: this choice's counts
    notes: list[str] = []  # with finish_reason: what was not honoured to the letter, as the request allowed
    error: ErrorInfo | None = None


class ErrorInfo(msgspec.Struct, kw_only=True):
    """A PhloemError in transit; see `phloem.errors` for kinds and HTTP states."""

    kind: str
    message: str
    status: int
    hint: str | None = None
    param: str | None = None
