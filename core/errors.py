"""Every error a user can meet; anything else that escapes is a bug.

PhloemError
├── ConfigError          the YAML, environment or command line is wrong (all problems at once)
├── PluginError          a named plugin is unknown, cannot load, or broke its contract
├── ModelError           a model cannot be found, read or served exactly
├── RequestError         one request is refused (HTTP 400); `param` names the culprit
│   └── ContextError     prompt plus max_tokens can never fit
├── QueueFullError       too many requests wait (HTTP 429)
├── AbortedError         the request was cancelled by its owner
├── StepError            the step that carried the request failed (HTTP 500); others go on
└── EngineDeadError      the model process is gone or restarting (HTTP 503)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PhloemError(Exception):
    """Base of all errors meant for a user: `message` says what is wrong and where, `hint` what to do."""

    status = 500
    kind = "internal_error"
    code: str | None = None  # OpenAI's machine-readable detail, e.g. "model_not_found"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def body(self) -> dict[str, Any]:
        """The error as HTTP clients see it: OpenAI's shape."""
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        kind = RequestError.kind if isinstance(self, RequestError) else self.kind
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ConfigError(PhloemError):
    """All problems of a configuration, one per line, each already carrying `file:line:col`."""

    kind = "config_error"

    def __init__(self, problems: Sequence[str] | str, *, hint: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint=hint)


class PluginError(PhloemError):
    """A plugin that the config names is unknown, fails to import, or speaks another `api` number."""

    kind = "plugin_error"


class ModelError(PhloemError):
    """A model cannot be found, read, or served exactly."""

    kind = "model_error"


class RequestError(PhloemError):
    """A request that cannot be honoured; refused at arrival, never half-run."""

    status = 400
    kind = "invalid_request_error"


class ContextError(RequestError):
    """Prompt plus requested output exceeds the context or the KV pool; the message has the arithmetic."""

    kind = code = "context_length_exceeded"


class QueueFullError(PhloemError):
    """The waiting queue is at its limit; retry after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"
    retry_after_s = 1


class AbortedError(PhloemError):
    """The request was aborted before it finished."""

    status = 499
    kind = "aborted"


class StepError(PhloemError):
    """A component raised inside a step; only the requests of that step fail."""

    kind = "engine_error"


class EngineDeadError(PhloemError):
    """The process that runs the model is gone; it is being restarted, or has given up."""

    status = 503
    kind = "service_unavailable"
