"""Reading JSON bodies: as FastAPI does, in half of the time for most. Nothing else runs while one is read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class JsonRequest(Request):
    """A request whose body msgspec reads; what it refuses is left to `json`, which says more, and reads `NaN`."""

    async def json(self) -> Any:
        """The body as Python values. Raises what `json.loads` raises."""
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return await super().json()


class JsonRoute(APIRoute):
    """A route that gets `JsonRequest`s: `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, on the faster request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
