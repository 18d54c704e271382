"""What admission expects of running requests, and what comes of it when demand exceeds the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from bench import overload
from phloem.foresight import PRIOR_SHARE, Floats, Foresight
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.request import Request


def request(written: int, room: int, reason: str | None = None, prompt: int = 10) -> Request:
    """One that has written so many tokens and may still write `room`."""
    call = GenerateCall(call_id="r", prompt=[1] * prompt, params=SamplingParams(max_tokens=written + room))
    made = Request(call, 0, seed=0, limit=prompt + written + room, arrival=0)
    made.tokens.extend([7] * written)
    made.capacity = len(made.tokens)
    made.finish_reason = reason
    return made


def taught(lengths: Sequence[int], reason: str = "stop") -> Foresight:
    foresight = Foresight()
    for length in lengths:
        foresight.learn(request(length, 400, reason))
    return foresight


def expected(foresight: Foresight, written: int, room: int = 400) -> float:
    return float(foresight.remaining([request(written, room)])[0])


def test_before_anything_has_ended_a_share_of_the_limit_is_kept() -> None:
    assert expected(Foresight(), 0) == PRIOR_SHARE * 400
    assert expected(Foresight(), 300, 100) == PRIOR_SHARE * 100


def test_lengths_are_learnt() -> None:
    foresight = taught([50] * 300)
    assert 45 <= expected(foresight, 0) <= 60
    assert 15 <= expected(foresight, 30) <= 30
    assert expected(foresight, 30, 5) <= 5, "never more than it may write"


@pytest.mark.parametrize("mean", [20, 100])
def test_a_memoryless_length_is_expected_anew_whatever_was_written(mean: int) -> None:
    rng = random.Random(0)
    foresight = taught([1 + int(rng.expovariate(1 / mean)) for _ in range(2000)])
    for written in (0, mean // 2, mean):
        assert 0.75 * mean <= expected(foresight, written, 4000) <= 1.4 * mean


def test_who_outlives_the_short_ones_is_expected_to_go_on() -> None:
    rng = random.Random(0)
    foresight = Foresight()
    for _ in range(400):
        short = rng.random() < 0.75
        foresight.learn(request(rng.randint(1, 20), 180, "stop") if short else request(200, 0, "length"))
    assert expected(foresight, 0, 200) < 80
    assert expected(foresight, 60, 140) > 120


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_a_request_that_was_cut_off_says_nothing_of_longer_ones(reason: str) -> None:
    assert expected(taught([16] * 300, reason), 0) > 380
    assert expected(taught([16] * 300, reason), 0, 16) >= 14


def test_a_change_of_the_load_is_learnt() -> None:
    foresight = taught([200] * 1000 + [10] * 500)
    assert expected(foresight, 0) < 40


def test_running_out_makes_careful_for_a_while() -> None:
    foresight = taught([50] * 300)
    before = expected(foresight, 0)
    foresight.ran_out()
    assert expected(foresight, 0) > 1.05 * before
    for _ in range(200):
        foresight.went_well()
    assert expected(foresight, 0) == before


class Told(Foresight):
    """Knows what is left of each."""

    def __init__(self, left: Sequence[float]) -> None:
        super().__init__()
        self.left = np.array(left, dtype=np.float64)

    def remaining(self, requests: Sequence[Request]) -> Floats:
        return self.left


@pytest.mark.parametrize("seed", range(20))
def test_demand_is_that_of_the_worst_moment(seed: int) -> None:
    """Against a run of all steps, one by one."""
    rng = random.Random(seed)
    requests = [request(rng.randint(0, 30), 99) for _ in range(rng.randint(1, 8))]
    left = [rng.randint(0, 40) for _ in requests]
    worst = max(
        sum(step if step <= n else -r.output_len for r, n in zip(requests, left, strict=True)) for step in range(41)
    )
    assert Told(left).demand(requests) == max(worst, 0)
    requests[0].capacity = 4  # of its tokens the others are still to be computed
    assert Told(left).demand(requests) == max(worst, 0) + len(requests[0].tokens) - 4


@pytest.mark.parametrize("case", list(overload.CASES))
def test_a_pool_too_small_by_a_tenth_is_no_reason_to_thrash(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    for name, value in {"POOL": 2048, "WARM": 40, "REQUESTS": 60}.items():
        monkeypatch.setattr(overload, name, value)
    row = overload.run(case, 1.1, "learnt", 0)
    assert row["retracted"] <= 10
    assert row["again"] <= 0.06
    assert row["speed"] >= 0.8 * overload.run(case, 1.1, "known", 0)["speed"]


def test_a_fixed_share_does_thrash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure of the test before can fail."""
    for name, value in {"POOL": 2048, "WARM": 40, "REQUESTS": 60}.items():
        monkeypatch.setattr(overload, name, value)
    assert overload.run("limit", 1.1, "share 0.3", 0)["retracted"] > 10
