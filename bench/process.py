"""A peer's worker process seen from the driver: start it, send a command, wait for the reply."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class PeerSpec:
    """Which adapter, in which interpreter, with which options: `adapter[@python][:key=value,...]`."""

    adapter: str
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> PeerSpec:
        """From the command line. Values are JSON where they parse as such, else strings."""
        head, _, tail = text.partition(":")
        adapter, _, python = head.partition("@")
        options: dict[str, Any] = {}
        for pair in filter(None, tail.split(",")):
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{text}: expected key=value, got {pair!r}")
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value
        return cls(adapter, python or sys.executable, options)

    @property
    def label(self) -> str:
        """Name in reports."""
        shown = [str(value) for key, value in self.options.items() if key in ("mode", "dtype", "slots")]
        return "-".join([self.adapter, *shown])


class WorkerError(RuntimeError):
    """The worker answered with an error, or ended."""


class Worker:
    """One engine, up from `__init__` to `close`; idle, it waits on a pipe and takes no time from the others."""

    def __init__(self, spec: PeerSpec, module: str = "bench.worker") -> None:
        """`module` is what the process runs; it speaks as bench.worker does."""
        self.spec = spec
        command = [spec.python, "-m", module, spec.adapter, json.dumps(spec.options)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        hello = self._read()
        self.ready_s: float = hello["ready_s"]
        self.about: dict[str, Any] = hello["about"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.spec.label} ended with code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.spec.label}: {reply['error']}")
        return reply

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"{self.spec.label} ended with code {self._process.wait()}") from error
        return self._read()

    def close(self) -> None:
        """End the worker by ending its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
