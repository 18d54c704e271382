"""A real server in a process of its own, for end-to-end and fault tests: start it, look into it, stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

START_S = 120  # a loaded machine needs a while to import torch


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Live:
    """`phloem serve MODEL`, waiting until it is ready. Use it as a context manager; it must end with status 0."""

    def __init__(self, model: Path | str, *sets: str, wait: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the server
        defaults = ("engine.threads=1", "engine.check=true", "server.heartbeat_s=0.1", "cache.tokens=8192")
        flags = [part for one in (*defaults, *sets) for part in ("--set", one)]
        command = [sys.executable, "-m", "phloem", "serve", str(model), "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        self.http = httpx.Client(base_url=self.url, timeout=120)
        if wait:
            self.until(lambda: self.status("/ready") == 200, START_S)

    @property
    def openai(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def model_pid(self) -> int:
        """The model process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    @property
    def output(self) -> str:
        """What the server has printed."""
        self.log.seek(0)
        return self.log.read().decode()

    def status(self, path: str) -> int:
        """Status of a GET; 0 while nobody listens."""
        try:
            return self.http.get(path, timeout=5).status_code
        except httpx.TransportError:
            return 0

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for a condition; the server's output is part of the failure."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None or condition(), f"the server has ended:\n{self.output}"
            assert time.monotonic() < end, f"waited in vain:\n{self.output}"
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Samples by name; label values other than the model's are appended: `phloem_kv_slots/0/free`."""
        found = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
                found["/".join([sample.name, *labels])] = sample.value
        return found

    def all_slots_back(self) -> bool:
        """Nobody runs, waits, holds or locks anything."""
        m = self.metrics()
        if "phloem_kv_slots/0/total" not in m:
            return False
        slots = {
            state: m[f"phloem_kv_slots/0/{state}"] for state in ("total", "free", "evictable", "protected", "leased")
        }
        idle = m["phloem_requests_running"] == m["phloem_requests_waiting"] == 0
        return (
            idle and slots["protected"] == slots["leased"] == 0 and slots["free"] + slots["evictable"] == slots["total"]
        )

    def complete(self, prompt: str = "The sugar", **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4} | body)

    def terminate(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        os.kill(self.process.pid, number)
        return self.process.wait(60)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            status = self.terminate() if self.process.poll() is None else 0
        finally:
            self.process.kill()
            self.process.wait()
            self.http.close()
        if kind is None:
            assert status == 0, f"exit status {status}:\n{self.output}"
            assert "Traceback" not in self.output, self.output
