"""Processes that die, start badly or are told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from live import Live

LONG = {"max_tokens": 900, "ignore_eos": True}


def under_load(live: Live, calls: int) -> tuple[list[threading.Thread], list[httpx.Response], list[str]]:
    """Half of the calls stream; returns the threads, the whole answers, and the last event of each stream."""
    answers: list[httpx.Response] = []
    last_events: list[str] = []

    def whole() -> None:
        answers.append(httpx.post(f"{live.url}/v1/completions", json={"prompt": "a b c"} | LONG, timeout=60))

    def streamed() -> None:
        body = {"prompt": "a b c", "stream": True} | LONG
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as reply:
            last_events.append([line for line in reply.iter_lines() if line][-1].removeprefix("data: "))

    threads = [threading.Thread(target=streamed if i % 2 else whole) for i in range(calls)]
    for thread in threads:
        thread.start()
    live.until(lambda: live.metrics()["phloem_requests_running"] == calls)
    time.sleep(0.1)
    return threads, answers, last_events


def test_kill_9_of_the_model_process_under_load(tiny_model: Callable[[str], Path]) -> None:
    with Live(tiny_model("llama")) as live:
        before = live.complete(temperature=0).json()["choices"]
        threads, answers, last_events = under_load(live, 20)
        victim = live.model_pid
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert {answer.status_code for answer in answers} == {503}
        assert len(answers) == len(last_events) == 10
        assert "died; it is being restarted" in answers[0].json()["error"]["message"]
        assert answers[0].headers["retry-after"]
        for event in last_events:
            assert json.loads(event)["error"]["type"] == "service_unavailable"
        assert live.status("/health") == 503
        assert live.complete().status_code == 503
        live.until(lambda: live.status("/ready") == 200, 120)
        assert live.model_pid != victim
        assert live.complete(temperature=0).json()["choices"] == before
        assert live.metrics()["phloem_model_restarts_total"] == 1
        assert "killed by SIGKILL" in live.output
        live.until(live.all_slots_back)


def test_drain_finishes_what_runs(tiny_model: Callable[[str], Path]) -> None:
    live = Live(tiny_model("llama"))
    threads, answers, last_events = under_load(live, 4)
    os.kill(live.process.pid, signal.SIGTERM)
    live.until(lambda: live.status("/ready") == 503)
    refused = live.complete()
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["usage"]["completion_tokens"] == 900
    assert last_events == ["[DONE]", "[DONE]"]
    assert live.process.wait(30) == 0, live.output
    assert "Traceback" not in live.output, live.output


def test_drain_ends_in_time(tiny_model: Callable[[str], Path]) -> None:
    live = Live(tiny_model("llama"), "server.drain_s=0.2")
    threads, answers, last_events = under_load(live, 4)
    started = time.monotonic()
    assert live.terminate(signal.SIGINT) == 0, live.output
    assert time.monotonic() - started < 15
    for thread in threads:
        thread.join(10)
    assert {answer.status_code for answer in answers} == {503}
    assert all("shutting down" in json.loads(event)["error"]["message"] for event in last_events)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    command = [sys.executable, "-m", "phloem", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = serve(str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert "phloem serve: the model process exited with status 1: " in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_api_is_refused(tiny_model: Callable[[str], Path]) -> None:
    done = serve(str(tiny_model("llama")), "--set", "server.apis=[opnai]")
    assert done.returncode == 2
    assert "did you mean 'openai'?" in done.stderr
