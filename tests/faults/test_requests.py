"""Bad requests, bad clients and too many of them: each ends in a clear error, and the server still serves."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live

PROCESSORS = Path(__file__).with_name("processors.py")
SLOW, BOMB = f"{PROCESSORS}:Slow", f"{PROCESSORS}:Bomb"
LONG = {"prompt": "The sugar", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path]) -> Iterator[Live]:
    samplers = f"samplers=[{{use: '{SLOW}'}}, {{use: '{BOMB}'}}]"
    with Live(tiny_model("llama"), samplers, "server.max_body=200k", "server.hang_s=2") as live:
        yield live


@pytest.fixture
def live(server: Live) -> Iterator[Live]:
    """The server; afterwards every slot must be back and a plain request must succeed."""
    yield server
    server.until(server.all_slots_back)
    assert server.complete().status_code == 200
    assert "phloem_model_restarts_total" in server.metrics()
    assert server.metrics()["phloem_model_restarts_total"] == 0


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"prompt": ', 400, "not valid JSON"),
        (b"", 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b"[" * 150_000, 400, "cannot be read as JSON"),
        (b'{"prompt": "' + b"x" * 300_000 + b'"}', 413, "exceeds 204800 bytes"),
        (b'{"prompt": "' + b"x y " * 40_000 + b'"}', 400, "exceeds the limit of 1024 tokens"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature must be a finite number"),
        (b'{"prompt": "a", "logit_bias": {"5": NaN}}', 400, "logit_bias"),
        (b'{"prompt": "a", "top_p": -Infinity}', 400, "top_p must be a finite number"),
        (b'{"prompt": ""}', 400, "prompt is empty"),
        (b'{"prompt": []}', 400, "prompt is empty"),
        (b'{"prompt": "\\udfff"}', 400, "lone surrogate"),
        (b'{"prompt": [99999999]}', 400, "outside the vocabulary"),
        (b'{"prompt": "a", "max_tokens": 1e3}', 400, "max_tokens"),
        (b'{"prompt": "a", "stop_regex": "("}', 400, "stop_regex"),
    ],
    ids=range(15),
)
def test_bad_bodies(live: Live, content: bytes, status: int, words: str) -> None:
    reply = live.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    assert words in reply.json()["error"]["message"]


def test_a_body_that_never_ends_is_cut_off(live: Live) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    reply = live.http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
    assert reply.status_code == 413


def raw_request(body: dict[str, Any], *headers: str) -> bytes:
    """A completion request as bytes."""
    raw = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers)
    return "\r\n".join([*lines, f"Content-Length: {len(raw)}", "", ""]).encode() + raw


def send(live: Live, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion has been asked for."""
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(raw_request(body))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slots(live: Live, stream: bool) -> None:
    """what-breaks 27: a client that left is still served."""
    before = live.metrics().get("phloem_requests_total/abort", 0)
    connections = [send(live, LONG | {"stream": stream}) for _ in range(5)]
    if stream:
        assert all(b"200 OK" in connection.recv(100) for connection in connections)
    live.until(lambda: live.metrics()["phloem_requests_running"] == 5)
    for connection in connections:
        connection.close()
    live.until(live.all_slots_back, 5)
    assert live.metrics()["phloem_requests_total/abort"] == before + 5


async def ask(live: Live, request: bytes) -> tuple[int, bytes]:
    """Status and body of one raw request on a connection of its own; a client library's pool would be the slow part."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


def test_a_thousand_queued_requests(live: Live) -> None:
    async def load() -> list[tuple[int, bytes]]:
        raw = raw_request({"prompt": "The sugar a leaf", "max_tokens": 2, "temperature": 0}, "Connection: close")
        tasks = [asyncio.create_task(ask(live, raw)) for _ in range(1000)]
        await asyncio.sleep(0.3)
        status, _ = await ask(live, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status == 200
        assert not all(task.done() for task in tasks), "health must not wait in the queue"
        return await asyncio.gather(*tasks)

    replies = asyncio.run(load())
    assert {status for status, _ in replies} == {200}
    assert len({json.loads(body)["choices"][0]["text"] for _, body in replies}) == 1


def test_abort_takes_exactly_the_named_call(live: Live) -> None:
    body = {"text": "The sugar", "sampling_params": {"max_tokens": 300, "ignore_eos": True, "temperature": 0}}
    replies: dict[str, Any] = {}

    def generate(rid: str) -> None:
        reply = httpx.post(f"{live.url}/generate", json=body | {"rid": rid}, timeout=60)
        replies[rid] = reply.json()["meta_info"]

    threads = [threading.Thread(target=generate, args=(rid,)) for rid in ("a", "ab")]
    for thread in threads:
        thread.start()
    live.until(lambda: live.metrics()["phloem_requests_running"] == 2)
    assert live.http.post("/abort", json={"rid": "a"}).json() == {"aborted": True}
    for thread in threads:
        thread.join()
    assert replies["a"]["finish_reason"] == "abort"
    assert replies["a"]["completion_tokens"] < 300
    assert (replies["ab"]["finish_reason"], replies["ab"]["completion_tokens"]) == ("length", 300)


def test_a_taken_port_is_found_before_the_model_is_loaded(live: Live, tiny_model: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "phloem", "serve", str(tiny_model("llama")), "--port", str(live.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{live.port}: Address already in use" in done.stderr
    assert "hint: choose another server.port" in done.stderr
    assert "Loading weights" not in done.stderr


def test_a_processor_that_raises_fails_its_own_request(live: Live) -> None:
    replies = []
    bystander = threading.Thread(target=lambda: replies.append(live.complete(max_tokens=50, ignore_eos=True)))
    bystander.start()
    reply = live.complete(logits_processors={"Bomb": {}})
    bystander.join()
    assert reply.status_code == 500
    assert "boom" in reply.json()["error"]["message"]
    assert replies[0].status_code in (200, 500)  # it may have shared the step


def test_health_is_answered_from_heartbeats_during_a_long_step(live: Live) -> None:
    """what-breaks 29: health fails while a long step runs, or is green while the engine hangs."""
    done: list[httpx.Response] = []
    slow = {"logits_processors": {"Slow": {"seconds": 3.5}}, "max_tokens": 1}
    thread = threading.Thread(target=lambda: done.append(live.complete(**slow)))
    thread.start()
    seen: list[str] = []
    while thread.is_alive():
        started = time.monotonic()
        reply = live.http.get("/health")
        assert time.monotonic() - started < 1.0, "a probe must not wait for the step"
        status = reply.json()["status"]
        assert (reply.status_code == 200) == (status == "ready")
        if not seen or seen[-1] != status:
            seen.append(status)
        time.sleep(0.05)
    # healthy at first; past hang_s (2 s here) the same silence counts as hung
    assert seen[:2] == ["ready", "hung"], seen
    assert done[0].status_code == 200
    live.until(lambda: live.status("/health") == 200, 5)
