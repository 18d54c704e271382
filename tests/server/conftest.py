"""Fixtures: the application in this process, on an echo engine that runs in a thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from phloem.interfaces import PluginContext
from phloem.plugins.api.native import NativeApi
from phloem.plugins.api.openai import OpenAIApi
from phloem.plugins.api.program import ProgramApi
from phloem.server.app import create_app
from phloem.server.gate import Gate
from phloem.server.remote import RemoteService
from phloem.server.wire import Abort, Ask, Beat, Events, Ready, Reply, Submit, decode_command

sys.path.insert(0, str(Path(__file__).parent))
from echo import EchoCore


class InProcess:
    """An echo engine on a thread behind a real RemoteService: all but the sockets. Also the app's view of health."""

    def __init__(self, **config: Any) -> None:
        self.core = EchoCore(config)
        self.service = RemoteService()
        self.restarts = 0
        self.healthy = True
        self.ready = True

    def health(self) -> tuple[bool, dict[str, Any]]:
        return self.healthy, {"status": "ready"}

    def latest(self) -> tuple[str, dict[str, Any]]:
        return "echo", self.core.stats()

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def receive(message: Any) -> None:
            loop.call_soon_threadsafe(self.service.receive, message)

        def send(data: bytes) -> None:
            command = decode_command(data)
            if isinstance(command, Submit):
                self.core.submit(command.call)
            elif isinstance(command, Abort):
                self.core.abort(command.call_id)
            elif isinstance(command, Ask):
                what, ticket = command.what, command.ticket
                arguments = command.arguments
                self.core.invoke(lambda core: receive(Reply(ticket, getattr(core, what)(*arguments))))

        self.service.receive(Ready(self.core.info, self.core.tokenizer_data, "", {}))
        self.service.connect(send)
        self.service.receive(Beat(0, 0.0, {}))
        emit = lambda events: receive(Events(events))  # noqa: E731
        self.thread = threading.Thread(target=self.core.run, args=(emit,), daemon=True)
        self.thread.start()

    async def settled(self) -> bool:
        """Whether the engine has nothing left to do, within two seconds."""
        end = time.monotonic() + 2
        while self.core.calls and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self.core.calls


@asynccontextmanager
async def serving(
    *,
    limit: int = 1000,
    timeout_s: float = 30.0,
    max_body: int = 100_000,
    max_source: int = 100_000,
    api_key: str | None = None,
    cors: tuple[str, ...] = (),
    parsers: dict[str, Any] | None = None,
    programs: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, InProcess, Gate]]:
    """A client of an application on an echo engine."""
    engine = InProcess(**config)
    engine.start()
    gate = Gate(engine.service, limit=limit, timeout_s=timeout_s, max_source=max_source)
    options = {"max_body": max_body, "api_key": api_key, "cors": cors, "config": {"server": {"port": 1}}}
    apis = [
        OpenAIApi(OpenAIApi.Options(), PluginContext("api", "openai", extras={"parsers": parsers or {}})),
        NativeApi(NativeApi.Options(), PluginContext("api", "native")),
        ProgramApi(ProgramApi.Options(**programs or {}), PluginContext("api", "program")),
    ]
    transport = httpx.ASGITransport(create_app(gate, engine, apis, **options), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, engine, gate
    finally:
        engine.core.stop()
        engine.thread.join(5)


@pytest.fixture
def run() -> Callable[..., Any]:
    """`run(test, **options)` runs `async test(client, engine, gate)` on a fresh application."""

    def runner(test: Callable[..., Any], **options: Any) -> Any:
        async def inner() -> Any:
            async with serving(**options) as (client, engine, gate):
                return await test(client, engine, gate)

        return asyncio.run(asyncio.wait_for(inner(), 60))

    return runner
