"""A phloem server in a process of its own, started for programs and ended with them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import IO, Any

import yaml

from phloem.errors import ConfigError, EngineDeadError

from ._failures import lacking
from .http import HttpBackend

POLL_S = 0.05
STOP_S = 60.0  # after SIGTERM a server lets what runs finish; then it is killed
SHOWN = 4000  # characters of the server's output that a message repeats
HOST = "127.0.0.1"


class Runtime(HttpBackend):
    """A backend on a server of its own: `Runtime("smollm2-135m", cache={"tokens": 8192})`.

    The engine works in other processes, so a program's own computing does not slow it. Ends with `close`, `aclose`,
    the `with` block, or this process.
    """

    def __init__(
        self,
        model: str | None = None,
        /,
        *,
        model_path: str | None = None,
        api_key: str | None = None,
        start_s: float = 600.0,
        timeout_s: float = 600.0,
        idle_s: float | None = None,
        **sections: Any,
    ) -> None:
        """The arguments of `phloem.Engine`, `server` among the sections; `api_key` is the key that it is set up with.

        Waits until the server is ready, at most `start_s`. Raises ConfigError with the server's own words if it ends
        before, EngineDeadError if it is not ready in time, PluginError if httpx is not installed.
        """
        try:
            import httpx  # noqa: F401 - asked for before a server is started in vain
        except ModuleNotFoundError as error:
            raise lacking("Runtime", "httpx") from error
        self._server = _Server(list(_command(model if model is not None else model_path, sections)))
        self._finalizer = weakref.finalize(self, self._server.stop)
        try:
            self._server.wait(start_s)
            super().__init__(self._server.url, api_key, timeout_s=timeout_s, idle_s=idle_s)
        except BaseException:
            self._finalizer()
            raise

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.process.pid

    @property
    def output(self) -> str:
        """What the server has printed."""
        return self._server.output

    async def aclose(self) -> None:
        """Close the connections and end the server."""
        await super().aclose()
        await asyncio.to_thread(self._finalizer)

    def close(self) -> None:
        """`aclose` for sync callers."""
        super().close()
        self._finalizer()


def _command(model: str | None, sections: Mapping[str, Any]) -> Iterator[str]:
    """The server's command line: every setting as a `--set`, so that names are looked up from here."""
    yield from (sys.executable, "-m", "phloem", "serve")
    if model is not None:
        yield str(model)
    server = {"host": HOST, "port": 0} | dict(sections.get("server", {}))
    for name, value in {**sections, "server": server}.items():
        settings = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, one in settings.items():
            text = yaml.safe_dump(one, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()
            yield from ("--set", f"{key}={text}")


class _Server:
    """The child process and what it prints."""

    def __init__(self, command: list[str]) -> None:
        self.url = ""
        # Appended to, so that reading it here moves no writing there; it lives as long as the server.
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        """What was printed so far."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait(self, seconds: float) -> None:
        """Wait for the banner, which is printed when the model is loaded, and which has the URL."""
        end = time.monotonic() + seconds
        while not self.url:
            if self.process.poll() is not None:
                raise ConfigError(f"the server ended with status {self.process.returncode}:\n{self._tail()}")
            if time.monotonic() > end:
                raise EngineDeadError(
                    f"the server was not ready after {seconds:g} s:\n{self._tail()}",
                    hint="give it more time: Runtime(..., start_s=...)",
                )
            time.sleep(POLL_S)
            found = [line.partition("curl ")[2] for line in self.output.splitlines() if line.startswith("curl http")]
            self.url = found[0].partition("/v1/")[0] if found else ""

    def _tail(self) -> str:
        return self.output[-SHOWN:].strip() or "(it has printed nothing)"

    def stop(self) -> None:
        """End the process: politely, then not. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(OSError):
            self._log.close()
