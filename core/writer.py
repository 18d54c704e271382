"""Turns emitted tokens into text, logprobs and events, and decides when a request is finished."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import PhloemError, StepError
from .messages import ErrorInfo, Event, TokenLogprob, Usage
from .request import Request


def write(request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
    """Append emitted tokens until one of them finishes the request; sets `finish_reason`. Later tokens are dropped."""
    for i, token in enumerate(tokens):
        request.tokens.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs[i])
        _advance_text(request, token, complete=_follow(request, token))
        if request.finish_reason is not None:
            return


def _follow(request: Request, token: int) -> bool:
    """Advance the grammar; is it complete? One that breaks, or forbids what its own mask allowed, ends its request."""
    try:
        if request.matcher is None or request.matcher.accept(token) or token in request.stop_ids:
            return request.matcher is not None and request.matcher.is_complete()
        request.error = StepError(f"the grammar forbids token {token}, which its mask allowed")
    except Exception as error:
        request.error = error if isinstance(error, PhloemError) else StepError(f"the grammar failed: {error!r}")
    return False


def _advance_text(request: Request, token: int, *, complete: bool) -> None:
    assert request.text is not None
    ended = token in request.stop_ids
    if not ended or request.params.include_stop:
        request.text.push(token)
    if request.error is not None:
        request.finish_reason = "error"
    elif ended:
        request.finish_reason = "stop"
        request.stop_reason = token if token in request.params.stop_token_ids else None
    elif request.text.stopped is not None:
        request.finish_reason = "stop"
        request.stop_reason = request.text.stopped
    elif request.text.error is not None:
        request.finish_reason, request.error = "error", request.text.error
    elif complete:
        request.finish_reason = "stop"
    elif request.remaining <= 0:
        request.finish_reason = "length"


def event(request: Request) -> Event | None:
    """What the caller has not seen yet; None if that is nothing, or if it asked for the end only."""
    finished = request.finish_reason is not None
    if not finished and not request.call.stream:
        return None
    assert request.text is not None
    made = Event(call_id=request.call.call_id, index=request.choice)
    made.token_ids = request.tokens[request.prompt_len + request.reported :].tolist()
    made.text = request.text.take(final=finished)
    if request.params.logprobs is not None:
        made.logprobs, request.logprobs = request.logprobs, []
    if request.prompt_logprobs_done and request.params.prompt_logprobs is not None and request.prompt_logprobs:
        made.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
    request.reported += len(made.token_ids)
    if finished:
        made.finish_reason = request.finish_reason
        made.stop_reason = request.stop_reason
        made.usage = Usage(
            prompt_tokens=request.prompt_len,
            completion_tokens=request.output_len,
            cached_tokens=request.cached_tokens or 0,
        )
        made.notes = request.notes
        made.scores = request.scoring.result if request.scoring is not None else None
        if request.error is not None:
            made.error = error_info(request.error)
    return made if finished or made.token_ids else None


def error_info(error: Exception) -> ErrorInfo:
    """An exception as it travels to the caller. What is not a PhloemError is shown by type and text only."""
    if isinstance(error, PhloemError):
        return ErrorInfo(
            kind=error.kind, message=error.message, status=error.status, hint=error.hint, param=error.param
        )
    return ErrorInfo(kind="internal_error", message=f"{type(error).__name__}: {error}", status=500)
