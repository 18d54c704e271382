"""Answers and failures of HTTP servers as this package's errors: what was wrong, at which server, what to do."""

from __future__ import annotations

from typing import Any

from phloem.errors import (
    AbortedError,
    ContextError,
    EngineDeadError,
    PhloemError,
    PluginError,
    QueueFullError,
    RequestError,
    StepError,
)

_BY_STATUS: dict[int, type[PhloemError]] = {
    429: QueueFullError,
    499: AbortedError,
    502: EngineDeadError,
    503: EngineDeadError,
    504: EngineDeadError,
}
_BY_TYPE: dict[str, type[PhloemError]] = {
    StepError.kind: StepError,
    AbortedError.kind: AbortedError,
    EngineDeadError.kind: EngineDeadError,
    QueueFullError.kind: QueueFullError,
}
MOST = 500  # characters of a foreign server's words that a message repeats


def refused(status: int, body: Any, url: str) -> PhloemError:
    """The error of a failed answer, or of an error event in a stream (`status` 0). `body` is JSON or text."""
    detail = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(detail, dict):
        detail = {"message": str(detail or "no message")[:MOST]}
    message = str(detail.get("message") or detail.get("detail") or "no message")
    kind = _BY_TYPE.get(str(detail.get("type")))
    if detail.get("code") == ContextError.code:
        kind = ContextError
    elif kind is None:
        wrong = 400 <= status < 500 or detail.get("type") == RequestError.kind
        kind = _BY_STATUS.get(status, RequestError if wrong else PhloemError)
    param = detail.get("param")
    error = kind(f"{url}: {message}", hint=_HINTS.get(status), param=param if isinstance(param, str) else None)
    if status:
        error.status = status
    return error


_HINTS = {
    401: "give the server's key: api_key=...",
    403: "give a key that may do this: api_key=...",
}


class UnansweredError(EngineDeadError):
    """A server does not answer, or went away in the middle of an answer: whether it did what it was asked is open."""


def unreachable(url: str, error: BaseException) -> UnansweredError:
    """The error of a request that failed below HTTP."""
    what = str(error) or type(error).__name__
    return UnansweredError(f"{url} does not answer: {what[:MOST]}", hint="is the server running, and is this its URL?")


def broken_off(url: str) -> UnansweredError:
    """The error of a stream that has no end."""
    return UnansweredError(f"{url}: the answer broke off", hint="the server ended, or something between cut it")


def lacking(what: str, package: str) -> PluginError:
    """The error of an optional package that is not installed."""
    return PluginError(f"{what} needs the package {package}", hint="pip install 'phloem[lang]'")


def surrogate(error: UnicodeEncodeError) -> RequestError:
    """The error of a text that no server can be sent."""
    return RequestError(
        f"the text has a lone surrogate (U+{ord(error.object[error.start]):04X}), which is not Unicode",
        hint="it came from decoding bytes with errors='surrogateescape', or from half of a JSON escape: leave it out",
    )
