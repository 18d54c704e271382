"""A phloem server in a process of its own, and its counters."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_S = 120
HEARTBEAT_S = 0.1  # counters are at most so old
COUNTERS = ("prefill_tokens", "scored_tokens")


class Server:
    """`phloem serve`, up when made. Use it as a context manager."""

    def __init__(self, sections: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        sets = [f"server.heartbeat_s={HEARTBEAT_S}", *_settings(sections)]
        flags = [part for one in sets for part in ("--set", one)]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the server
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phloem", "serve", sections["model"]["path"], "--port", str(port), *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._http = httpx.Client(base_url=self.url, timeout=60)
        self._wait()
        self.model: str = self._http.get("/v1/models").json()["data"][0]["id"]

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                if self._http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                self._log.seek(0)
                raise RuntimeError(f"the server did not start:\n{self._log.read().decode()}")
            time.sleep(0.1)

    def flush(self) -> None:
        """Empty its cache."""
        self._http.post("/flush_cache").raise_for_status()

    def counters(self) -> dict[str, float]:
        """Its counters, once they include all that has ended by now."""
        time.sleep(3 * HEARTBEAT_S)
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(self._http.get("/metrics").text)
            for sample in family.samples
        }
        return {name: samples.get(f"phloem_{name}_total", 0.0) for name in COUNTERS}

    def close(self) -> None:
        """Stop it."""
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settings(sections: dict[str, Any]) -> Iterator[str]:
    """Sections of a configuration as `section.key=value`, the model's path left out."""
    for section, values in sections.items():
        for key, value in values.items():
            if (section, key) != ("model", "path"):
                yield f"{section}.{key}={value if isinstance(value, str) else json.dumps(value)}"
