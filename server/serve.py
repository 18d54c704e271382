"""Life of a server: bind, start the model process, answer, drain on SIGTERM, end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from phloem.config import Config
from phloem.errors import ConfigError, EngineDeadError

from ._apis import api_name, build_apis
from .app import create_app
from .banner import show_banner
from .gate import Gate
from .remote import RemoteService
from .supervisor import Patience, Supervisor

log = logging.getLogger(__name__)
MOST_FILES = 65_536
KEEP_ALIVE_S = 75  # longer than load balancers and clients keep idle connections, so that they close first
LAST_ANSWERS_S = 5  # for answers that were cut off at the end of a drain to reach their clients


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: it would close the port first, and end with the signal's status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Server`."""
        yield


class Server:
    """One server; `run` serves until it has ended and returns the exit status."""

    def __init__(self, config: Config, process: asyncio.subprocess.Process | None = None) -> None:
        """Binds the port. Raises ConfigError if it is taken, or for an API's options; PluginError if an API cannot be
        loaded. `process` is a model process that has been spawned already.
        """
        self.config = config
        options = config.server
        parsers = {"tools": options.tool_parser, "reasoning": options.reasoning_parser}
        apis = build_apis(options.apis, parsers)
        self.socket = _bind(options.host, options.port)
        self.service = RemoteService()
        patience = Patience(options.heartbeat_s, options.hang_s, options.max_restarts)
        self.supervisor = Supervisor(self.service, config.to_dict(), patience, on_ready=self._announce, first=process)
        limit = config.schedule.max_running + config.schedule.max_waiting
        largest = config.grammar.max_source
        self.gate = Gate(self.service, limit=limit, timeout_s=options.request_timeout_s, max_source=largest)
        app = create_app(
            self.gate,
            self.supervisor,
            apis,
            config=config.dump(),
            max_body=options.max_body,
            api_key=options.api_key.value.get_secret_value() if options.api_key else None,
            cors=options.cors,
        )
        settings = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            lifespan="off",
        )
        self.http = _Uvicorn(settings)
        self._signals = 0

    @property
    def url(self) -> str:
        """Where clients reach the server."""
        host, port = self.socket.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{shown}:{port}"

    async def run(self) -> int:
        """Serve until a signal or until the model process cannot be kept alive. On the loop of the spawned process."""
        _allow_connections()
        loop = asyncio.get_running_loop()
        ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, functools.partial(self._on_signal, ending))
        supervision = asyncio.create_task(self.supervisor.run())
        answering = asyncio.create_task(self.http.serve(sockets=[self.socket]))
        asked = asyncio.create_task(ending.wait())
        await asyncio.wait({supervision, answering, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if asked.done() and not asked.cancelled():
            await self._drain()
        await self.supervisor.stop()
        self.http.should_exit = True
        await answering
        status = await supervision
        if self.supervisor.failure is not None:
            print(f"phloem serve: {self.supervisor.failure}", file=sys.stderr)
        return status

    def _on_signal(self, ending: asyncio.Event) -> None:
        """The first signal drains, a second one ends at once."""
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: ending without waiting for %d requests", self.gate.open)
            self.service.fail_all(EngineDeadError("the server is shutting down"))
            self.http.force_exit = True
        ending.set()

    async def _drain(self) -> None:
        """New calls get 503, those in flight may finish for `drain_s`, then they end with an error."""
        seconds = self.config.server.drain_s
        log.info("draining: %d requests have %g s to finish", self.gate.open, seconds)
        if not await self.gate.drain(seconds):
            log.warning("%d requests did not finish in time", self.gate.open)
            self.service.fail_all(EngineDeadError("the server is shutting down and could not wait any longer"))
            await self.gate.drain(1.0)

    def _announce(self, ready: object) -> None:
        """The model is loaded: print the banner, once; after a restart a line."""
        assert self.service.ready is not None
        if self.supervisor.restarts:
            log.info("the model process is back (restart %d)", self.supervisor.restarts)
            return
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it again would hold requests up
        options = self.config.server
        names = tuple(map(api_name, options.apis))
        show_banner(self.service.ready, self.url, names, key_needed=options.api_key is not None)


def _allow_connections() -> None:
    """Raise the soft limit of open files to the hard one: each waiting client is one, and 1,024 is a common default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before any work is done for a server that could not listen. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}",
            hint="choose another server.port (--port; 0 takes a free one) or server.host (--host)",
        ) from error
    return bound
