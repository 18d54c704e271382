"""Every failure as an answer in OpenAI's shape: ours, FastAPI's validation, unknown routes, and bugs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phloem.errors import EngineDeadError, PhloemError, QueueFullError, RequestError

log = logging.getLogger(__name__)
RETRY_DEAD_S = 5  # Retry-After of a 503: about what a small model takes to load


class NotFoundError(RequestError):
    """There is no such route."""

    status = 404
    code = "not_found"


class MethodError(RequestError):
    """The route does not take this method."""

    status = 405
    code = "method_not_allowed"


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every failed answer; for the OpenAPI document."""

    error: ErrorDetail


def error_response(error: PhloemError) -> Response:
    """The answer for an error. ASCII JSON: a message may quote text that is not valid Unicode."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, EngineDeadError):
        headers["Retry-After"] = str(RETRY_DEAD_S)
    elif error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = json.dumps(error.body()).encode()
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Register the handlers on an application."""

    async def phloem_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PhloemError)
        return error_response(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(as_request_error(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_translate(request, error))
        response.headers.update(error.headers or {})  # Allow, of a 405
        return response

    async def bug(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(PhloemError("internal error", hint="the server's log has the details"))

    app.add_exception_handler(PhloemError, phloem_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)


def _translate(request: Request, error: HTTPException) -> PhloemError:
    """The framework's own errors in our words."""
    if isinstance(error.detail, PhloemError):
        return error.detail
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return NotFoundError(f"{where} does not exist", hint="GET /openapi.json lists the routes")
    if error.status_code == 405:
        return MethodError(
            f"{where} is not allowed", hint=f"use {(error.headers or {}).get('Allow', 'another method')}"
        )
    if error.detail == "There was an error parsing the body":  # FastAPI's words for all but plain syntax errors
        return RequestError("the body cannot be read as JSON", hint="is it nested too deeply, or a number too long?")
    translated: PhloemError = RequestError(str(error.detail)) if error.status_code < 500 else PhloemError(error.detail)
    translated.status = error.status_code
    return translated


def as_request_error(problems: Sequence[Any]) -> RequestError:
    """One message from pydantic's list: the first parameter that is wrong, with all forms that it could have had."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if len(first["loc"]) == 1:
        return RequestError(
            "the body must be a JSON object", hint="send JSON with the header Content-Type: application/json"
        )
    param = _param(first)
    if first["type"] == "missing":
        return RequestError(f"{param} is missing", param=param)
    reasons = list(dict.fromkeys(_reason(p) for p in problems if _param(p) == param))
    return RequestError(f"{param}: {' or '.join(reasons[:6])}", param=param)


def _param(problem: Any) -> str:
    """`messages[0].role` from a location; the branch names of unions, which follow the field, are left out."""
    name = ""
    for part in problem["loc"][1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and not (name and part in _BRANCHES):
            name += f".{part}" if name else part
        else:
            break
    return name or "body"


_BRANCHES = frozenset({"str", "int", "bool", "float"})


def _reason(problem: Any) -> str:
    message = str(problem["msg"]).replace("valid dictionary or object to extract fields from", "JSON object")
    return message[0].lower() + message[1:]
