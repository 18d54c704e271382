"""Program states through restarts: of the model process, and of the whole server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from live import Live

GENERATE = {"sampling_params": {"max_tokens": 6, "temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def test_a_program_outlives_the_model_process_and_not_the_server(llama: Path) -> None:
    with Live(llama) as live:
        path = "/v1/programs/" + live.http.post("/v1/programs", json={"text": "The sugar"}).json()["id"]
        first = live.http.post(f"{path}/generate", json=GENERATE).json()
        answers: list[httpx.Response] = []
        long = {"sampling_params": {"max_tokens": 900, "ignore_eos": True}}
        thread = threading.Thread(target=lambda: answers.append(live.http.post(f"{path}/generate", json=long)))
        thread.start()
        live.until(lambda: live.metrics().get("phloem_requests_running") == 1)
        os.kill(live.model_pid, signal.SIGKILL)
        thread.join(60)
        assert answers[0].status_code == 503
        assert answers[0].headers["retry-after"]
        live.until(lambda: live.status("/ready") == 200, 120)
        state = live.http.get(path).json()
        assert state["text"] == "The sugar" + first["text"]
        second = live.http.post(f"{path}/generate", json=GENERATE)
        assert second.status_code == 200
        prompt = {"input_ids": state["token_ids"], **GENERATE}
        assert second.json()["token_ids"] == live.http.post("/generate", json=prompt).json()["output_ids"]
        assert live.http.delete(path).json() == {"ok": True}
        live.until(live.all_slots_back)
    with Live(llama) as live:
        answer = live.http.post(f"{path}/append", json={"text": "x"})
        assert answer.status_code == 404
        assert "restarted" in answer.json()["error"]["message"]
