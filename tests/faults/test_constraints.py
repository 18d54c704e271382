"""Constraints as attacks, on a real server: nobody else notices, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live
from process_tree import computing, descendants, idle

WILD = Path(__file__).parents[1] / "unit" / "wild_grammars.py"
CATASTROPHE = {"prompt": "x", "regex": "!backtrack", "max_tokens": 4}


@pytest.fixture(scope="module")
def live(tiny_model: Callable[[str], Path]) -> Iterator[Live]:
    with Live(tiny_model("llama"), f"grammar.use={WILD}:Wild", "grammar.timeout_s=60", "server.hang_s=3") as server:
        yield server


def post(live: Live, body: dict[str, Any], seconds: float) -> httpx.Response | None:
    """The answer, unless it takes longer."""
    try:
        return httpx.post(f"{live.url}/v1/completions", json=body, timeout=seconds)
    except httpx.ReadTimeout:
        return None


def test_no_cpu_is_used_one_second_after_its_client_has_gone(live: Live) -> None:
    """what-breaks 33: a compilation that nobody waits for burns on."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=CATASTROPHE, timeout=httpx.Timeout(30, read=2.0))
    time.sleep(1)
    assert idle(live.model_pid)
    assert live.complete().status_code == 200


def test_a_long_compilation_is_no_hang(live: Live) -> None:
    """The watch over the model process waits for steps, of which a compilation needs none."""
    pid = live.model_pid
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=CATASTROPHE, timeout=httpx.Timeout(30, read=5.0))
    assert live.model_pid == pid
    assert live.complete().status_code == 200


def test_refusals_are_400s(live: Live) -> None:
    body = {"prompt": "x", "regex": "!invalid"}
    reply = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "regex")
    assert "this is no regex" in reply.json()["error"]["message"]
    stream = httpx.post(f"{live.url}/v1/completions", json=body | {"stream": True}, timeout=60)
    assert stream.status_code == 400


def test_nothing_outlives_a_model_process_that_is_killed(live: Live) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=CATASTROPHE, timeout=httpx.Timeout(30, read=0.1))
    pid = live.model_pid
    below = descendants(pid)
    assert below
    os.kill(pid, signal.SIGKILL)
    live.until(lambda: not any(Path(f"/proc/{one}").exists() for one in below), 10)
    live.until(lambda: live.status("/ready") == 200, 120)
    assert live.complete().status_code == 200


def test_a_new_constraint_does_not_wait_for_catastrophes(live: Live) -> None:
    """Each held the compile process for `grammar.timeout_s`, a minute here."""
    body = {"prompt": "x", "regex": "[ab]{3}", "max_tokens": 4}
    with ThreadPoolExecutor(5) as pool:
        hostile = [pool.submit(post, live, CATASTROPHE | {"regex": f"!backtrack {i}"}, 40) for i in range(5)]
        time.sleep(2)
        reply = post(live, body, 30)
        assert reply is not None
        assert reply.status_code == 200, reply.text
        assert not any(one.done() for one in hostile)
    live.until(lambda: computing(live.model_pid) == [], 10)
