"""What a request writes does not depend on the order in which requests run, nor on who is retracted for whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equivalence.harness import assert_same, engine, greedy, tiny_reference
from equivalence.test_matrix import COUNT, PROMPTS, check
from phloem.registry import Registry

POLICIES = Registry().names("schedule")


@pytest.mark.parametrize(("policy", "overlap"), [(policy, ("off", "on")[i % 2]) for i, policy in enumerate(POLICIES)])
def test_every_policy_writes_the_same_in_a_pool_that_forces_retraction(
    tiny_model: Callable[[str], Path], policy: str, overlap: str
) -> None:
    stats = check(
        tiny_model("llama"),
        pool=200,
        cache={"page_size": 4 if overlap == "on" else 1},
        schedule={"use": policy, "chunk": 16},
        engine={"overlap": overlap},
    )
    assert stats["retractions"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_writes_the_same_one_at_a_time(tiny_model: Callable[[str], Path], policy: str) -> None:
    check(tiny_model("llama"), most=4, schedule={"use": policy, "max_running": 1})


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preempted_requests_write_the_same(tiny_model: Callable[[str], Path], overlap: str) -> None:
    """Low priorities run; each higher one that comes takes the place of the lowest."""
    folder = tiny_model("llama")
    reference = tiny_reference(folder)
    schedule = {"use": "priority", "preempt_at": 1, "max_running": 2, "chunk": 16}
    with engine(folder, schedule=schedule, engine={"overlap": overlap}) as running:
        streams = []
        for i, prompt in enumerate(PROMPTS):
            stream = running.stream(prompt, greedy(COUNT), priority=i)
            streams.append(
                (prompt, stream, list(next(stream).token_ids))
            )  # it runs: those below may have been retracted
        for prompt, stream, begun in streams:
            got = begun + [token for piece in stream for token in piece.token_ids]
            assert_same(got, *reference.greedy(prompt, COUNT), f"prompt of {len(prompt)}")
        assert running.stats()["retractions"] > 0
