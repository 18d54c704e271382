"""What every HTTP request passes before a route sees it: authentication, body limit, and a count of the answers."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phloem.errors import PhloemError, RequestError

from .errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no secrets and get none
DISCARD_FACTOR = 8  # an oversized body is read and dropped up to so many times the limit, so that clients see the 413


class UnauthorizedError(PhloemError):
    """The API key is missing or wrong."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class BodyTooLargeError(RequestError):
    """The request body exceeds the limit."""

    status = 413


class ApiKey:
    """Bearer authentication; compares in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            error = UnauthorizedError("the API key is missing or wrong", hint="send Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


class BodyLimit:
    """Refuses bodies over `limit` bytes, declared or streamed, with 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body as the route reads it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._discard(receive)
            await error_response(self._error())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                await self._discard(receive)
                raise HTTPException(413, detail=self._error())  # type: ignore[arg-type]
            return message

        await self.app(scope, counted, send)

    def _error(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the request body exceeds {self._limit} bytes", hint="send less, or raise server.max_body"
        )

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a connection reset would reach the client before the answer does."""
        left = self._limit * DISCARD_FACTOR
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b"")) or 1
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return


class CountAnswers:
    """Tells `count(route, status)` of every answer; `route` is the template, so that metrics stay few."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self.app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Watch the status line go by."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        await self.app(scope, receive, watched)
