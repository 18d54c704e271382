"""Server-sent events: a response that ends its generator when the client leaves, and reports errors in the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phloem.errors import PhloemError

from ._run import gone, unless_gone

DONE = b"data: [DONE]\n\n"
STREAMS: dict[int | str, dict[str, Any]] = {  # what a generating route adds to the OpenAPI document
    200: {"description": "The answer; server-sent events with stream: true.", "content": {"text/event-stream": {}}}
}
_encoder = msgspec.json.Encoder()
_log = logging.getLogger("phloem.api")


def sse(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def json_response(payload: Any) -> Response:
    """A JSON answer, encoded once and not validated again."""
    return Response(_encoder.encode(payload), media_type="application/json")


class EventStream(Response):
    """Streams `chunks` after `first`. A closed connection closes the generator, and with it the calls behind it."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first = first
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator ends or the client leaves, whichever is first."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pump, watch = asyncio.create_task(self._pump(send)), asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            pump.cancel()
            watch.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)
            await self.chunks.aclose()

    async def _pump(self, send: Send) -> None:
        """Send chunks; an error becomes the stream's last event, since the status line has gone out."""
        try:
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except PhloemError as error:
            await send({"type": "http.response.body", "body": sse(error.body()), "more_body": True})
        except OSError:
            return  # the connection broke while we wrote
        except Exception:
            _log.exception("a stream failed")
            body = PhloemError("internal error").body()
            await send({"type": "http.response.body", "body": sse(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream(request: Request, chunks: AsyncGenerator[bytes, None]) -> EventStream:
    """Start streaming once there is a first chunk, so that a refused call gets its own status and not 200."""

    async def first_chunk() -> bytes:
        return await anext(chunks)

    try:
        first = await unless_gone(request.receive, first_chunk())
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks)
