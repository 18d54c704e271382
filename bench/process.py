"""A peer's worker process seen from the driver: start it, send a command, wait for the reply."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TELLING = ("mode", "dtype", "slots", "weights", "kind")  # options that tell two peers of one adapter apart


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
        shown = [str(value) for key, value in self.options.items() if key in _TELLING]
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
        self.rest_mb = memory(self._process.pid)[0]

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

    def facts(self) -> dict[str, Any]:
        """Versions, seconds until it was ready, and the memory of it and its children: then, and at most so far."""
        most = memory(self._process.pid)[1]
        return {"about": self.about, "ready_s": self.ready_s, "rest_mb": self.rest_mb, "most_mb": most}

    def close(self) -> None:
        """End the worker by ending its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def memory(pid: int) -> tuple[float, float]:
    """Resident memory of a process and all below it, now and at most, in MB; zeros where there is no /proc."""
    root = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        below = [int(child) for task in (root / "task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return 0.0, 0.0
    now, most = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    for child in below:
        more, higher = memory(child)
        now, most = now + more, most + higher
    return now, most
