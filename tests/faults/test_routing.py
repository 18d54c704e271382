"""Cache events of a real server: its model process publishes them, dies, and publishes again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from live import Live, free_port

from phloem.mirror import Follower


def test_a_router_follows_a_server_through_the_death_of_its_model(tiny_model: Callable[[str], Path]) -> None:
    """What the dead process had cached is forgotten; what the new one has is known, under the same addresses."""
    publish, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    sets = ("events.use=zmq", f"events.endpoint={publish}", f"events.replay={replay}", "events.block_size=4")
    old, new = [5, 6, 7, 8] * 4, [9, 10, 11, 12] * 4

    with Live(tiny_model("llama"), *sets) as live, Follower(publish, replay, timeout_s=1.0, check_s=0.1) as follower:

        def knows(prompt: list[int], tokens: int) -> bool:
            try:
                follower.poll(0.05)
            except TimeoutError:
                return False
            return follower.longest_prefix(prompt) == tokens

        def generate(prompt: list[int]) -> None:
            body = {"input_ids": prompt, "sampling_params": {"max_tokens": 2}}
            assert live.http.post("/generate", json=body).status_code == 200

        generate(old)
        live.until(lambda: knows(old, 16))
        source, victim = follower.source, live.model_pid
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(TimeoutError, match="no answer from"):
            follower.sync()
        assert follower.longest_prefix(old) == 16, "nothing is known to the contrary"
        live.until(lambda: live.status("/ready") == 200, 120)
        generate(new)
        live.until(lambda: knows(new, 16))
        assert knows(old, 0)
        assert follower.source != source


def test_a_server_says_that_an_address_is_in_use(tiny_model: Callable[[str], Path]) -> None:
    port = free_port()
    taken = f"events.endpoint=tcp://127.0.0.1:{port}"
    free = f"events.replay=tcp://127.0.0.1:{free_port()}"
    with Live(tiny_model("llama"), "events.use=zmq", taken, free):
        other = Live(
            tiny_model("llama"), "events.use=zmq", taken, f"events.replay=tcp://127.0.0.1:{free_port()}", wait=False
        )
        with other.http:
            assert other.process.wait(60) == 1
        assert f"events.endpoint: cannot listen on tcp://127.0.0.1:{port}: the address is in use" in other.output
        assert "Traceback" not in other.output
