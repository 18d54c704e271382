"""The HTTP application on an engine of this process, with no socket and no model process between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from phloem import Engine
from phloem.interfaces import Api
from phloem.server.app import create_app
from phloem.server.gate import Gate


class Healthy:
    """What the application asks of a supervisor."""

    restarts, ready = 0, True

    def health(self) -> tuple[bool, dict[str, Any]]:
        return True, {}

    def latest(self) -> tuple[str, dict[str, Any]]:
        return "", {}


@asynccontextmanager
async def on_engine(
    folder: Path, apis: Sequence[Api], **sections: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A client of these route sets, and the engine behind them."""
    sections = {"engine": {"check": True, "threads": 1}, "grammar": "none"} | sections
    with Engine(str(folder), **sections) as engine:
        gate = Gate(engine.service(), limit=1000, timeout_s=60, max_source=2**20)
        app = create_app(gate, Healthy(), apis, config={}, max_body=100_000)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield client, engine
