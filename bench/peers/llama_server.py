"""llama.cpp's server over HTTP, started and stopped with the adapter."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.workloads import Tokens

TOKENS_PER_SLOT = 1088  # the longest request of the workloads: 1,024 + 32 + 16, rounded up


class LlamaServer:
    """Each prompt is a request of its own; the server batches them over its slots."""

    def __init__(
        self, binary: str, gguf: str, slots: int, port: int, threads: int, share: bool, spec: str, ends: bool
    ) -> None:
        context = str(slots * TOKENS_PER_SLOT)
        command = [binary, "-m", gguf, "-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", context, "-cb"]
        if spec != "none":
            command += ["--spec-type", spec]
        self._port, self._share, self._ends = port, share, ends
        self._texts: dict[tuple[int, ...], str] = {}
        self._server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "-b", "2048", "-ub", "512"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.about = {"llama_server": _version(binary), "slots": slots, "gguf": gguf}
        self._wait()

    def _wait(self) -> None:
        while self._server.poll() is None:
            try:
                if self._request("GET", "/health").status == 200:
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"llama-server ended with code {self._server.returncode} before it was ready")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        return connection.getresponse()

    def _complete(self, prompt: Tokens, max_tokens: int, schema: dict[str, Any] | None) -> Tokens:
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["temperature"],
            "ignore_eos": schema is None and not self._ends,
            "cache_prompt": self._share,
            "return_tokens": True,
        }
        if schema is not None:
            body["json_schema"] = schema
        reply = json.loads(self._request("POST", "/completion", body).read())
        if "tokens" not in reply:
            raise RuntimeError(f"llama-server answered {str(reply)[:300]}")
        tokens: Tokens = reply["tokens"]
        self._texts[tuple(tokens)] = reply["content"]
        return tokens

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts as concurrent requests."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, max_tokens, schema), prompts))

    def text(self, ids: Tokens) -> str:
        """The text of an earlier output with these ids."""
        return self._texts[tuple(ids)]

    def close(self) -> None:
        """Stop the server."""
        self._server.terminate()
        self._server.wait(20)


def _version(binary: str) -> str:
    """What it says of itself, such as "11434 (unknown)"."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True)
    lines = [line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version:")]
    return lines[0].removeprefix("version:").strip() if lines else ""


def connect(
    gguf: str,
    binary: str = "llama-server",
    slots: int = 32,
    port: int = 18080,
    threads: int = 2,
    share: bool = True,
    spec: str = "none",
    ends: bool = False,
    kind: str | None = None,
) -> LlamaServer:
    """Start llama-server and wait until it is healthy. `spec` is its --spec-type; with `ends` the model ends texts.

    `kind`, that of the file's weights, is for reports only.
    """
    return LlamaServer(binary, gguf, slots, port, threads, share, spec, ends)
