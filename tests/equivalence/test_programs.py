"""Groups and holds on whole engines: what is computed, what stays, and that outputs never change."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import assert_same, engine, greedy, prompts, tiny_reference
from equivalence.test_steps import Stepper
from phloem import Engine, SamplingParams

Tiny = Callable[[str], Path]
ROOT = [40, 41, 42, 43, 44]
FORK = [[*ROOT, 100 + i, 60, 61, 62, *([200 + j] if j else []), 63, 64] for i in range(3) for j in range(3)]
OTHERS = prompts(12, low=40, high=60, shared=0, seed=3)
HELD = prompts(1, low=60, high=60, seed=4)[0]


@pytest.fixture(scope="module")
def llama(tiny_model: Tiny) -> Path:
    return tiny_model("llama")


def minimum(texts: list[list[int]]) -> int:
    """Design §3."""
    return len({tuple(p[:i]) for p in texts for i in range(1, len(p))}) + len(texts)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_tree_of_forks_is_computed_once_in_either_order(
    llama: Path, chunk: int, backwards: bool, overlap: str
) -> None:
    """Prefixes are shorter than 16 tokens; the last token of every prompt is run for itself."""
    bench = Stepper(llama, schedule={"chunk": chunk}, engine={"overlap": overlap})
    order = list(enumerate(FORK))[:: -1 if backwards else 1]
    for i, prompt in order:
        more: dict[str, Any] = {"score": [[5, 6], [7]]} if i % 4 == 3 else {}
        bench.submit(f"{i}", prompt, SamplingParams() if more else greedy(4), group="g", **more)
        if i % 2:
            bench.step()
    bench.finish()
    assert bench.core.stats()["prefill_tokens"] == minimum(FORK)
    for i, prompt in order:
        if i % 4 == 3:
            (event,) = bench.of(f"{i}")
            assert event.scores is not None
        else:
            assert_same(bench.tokens(f"{i}"), *tiny_reference(llama).greedy(prompt, 4))
    assert bench.all_free()


def test_pages_are_rounded(llama: Path) -> None:
    with engine(llama, cache={"page_size": 4}) as running:
        long = [[*range(50, 62), 100 + i, 7] for i in range(5)]
        running.generate(long, greedy(2), group="g")
        assert running.stats()["prefill_tokens"] == 12 + 5 * 2


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_a_hold_survives_other_traffic(llama: Path, page: int, overlap: str) -> None:
    reference = tiny_reference(llama)
    sections = {"cache": {"tokens": 512, "page_size": page}, "engine": {"overlap": overlap}}
    for hold, kept in (("mine", True), (None, False)):
        with engine(llama, **sections) as running:
            first = running.generate(HELD, greedy(8), hold=hold)
            for other in OTHERS:
                assert_same(running.generate(other, greedy(12)).token_ids, *reference.greedy(other, 12))
            assert running.stats()["evicted_tokens"] > 0
            longer = [*HELD, *first.token_ids, 9]
            second = running.generate(longer, greedy(8), hold=hold)
            assert_same(second.token_ids, *reference.greedy(longer, 8))
            computed = len(HELD) + 7
            assert (second.usage.cached_tokens == computed // page * page) == kept
            if kept:
                held = (len(longer) + 7) // page * page
                assert running.stats()["holds"] == {"count": 1, "tokens": held, "revoked": 0, "expired": 0}
                assert running.drop_hold("mine")
                assert not running.drop_hold("mine")
            assert running.stats()["groups"][0]["protected"] == 0


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_holds_go_before_anything_is_retracted(llama: Path, page: int, overlap: str) -> None:
    sections = {"cache": {"tokens": 256, "page_size": page}, "engine": {"overlap": overlap}}
    with engine(llama, schedule={"hold_share": 1.0}, **sections) as running:
        for i, prompt in enumerate(OTHERS[:4]):
            running.generate(prompt, greedy(4), hold=f"{i}")
        assert running.stats()["holds"]["tokens"] > 150
        results = running.generate(OTHERS[4:6], greedy(40))
        for prompt, result in zip(OTHERS[4:6], results, strict=True):
            assert_same(result.token_ids, *tiny_reference(llama).greedy(prompt, 40))
        stats = running.stats()
        assert stats["retractions"] == 0
        assert stats["holds"]["revoked"] > 0


def test_what_fits_without_holds_runs_together_at_once(llama: Path) -> None:
    bench = Stepper(llama, cache={"tokens": 256}, schedule={"hold_share": 1.0})
    bench.submit("held", HELD * 3, greedy(4), hold="h")
    bench.finish()
    for i in range(2):
        bench.submit(f"{i}", OTHERS[i][:40], greedy(20))
    bench.step()
    assert len(bench.core.scheduler.running) == 2
    bench.finish()
    assert bench.core.stats()["holds"]["revoked"] == 1
    assert bench.core.stats()["retractions"] == 0


def test_a_hold_expires(llama: Path) -> None:
    with engine(llama, schedule={"hold_idle_s": 0.1}) as running:
        running.generate(HELD, greedy(2), hold="a")
        assert running.stats()["holds"]["count"] == 1
        time.sleep(0.15)
        assert running.stats()["holds"] == {"count": 0, "tokens": 0, "revoked": 0, "expired": 1}
        assert running.stats()["groups"][0]["protected"] == 0


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_calls_aborted_after_any_step_leave_no_hold(llama: Path, page: int, overlap: str) -> None:
    bench = Stepper(llama, cache={"page_size": page}, schedule={"chunk": 8}, engine={"overlap": overlap})
    for steps in range(12):
        bench.submit("doomed", HELD[:20], greedy(20), hold="h", salt=f"{steps}")
        for _ in range(steps):
            bench.step()
        assert bench.core.abort_now("doomed")
        bench.finish()
        assert bench.core.stats()["holds"]["count"] == 0
    assert bench.all_free()


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_a_turn_that_is_aborted_or_too_long_leaves_the_held_one_right(llama: Path, page: int, overlap: str) -> None:
    """what-breaks 25: a held path goes on as if the turn had never been asked for."""
    reference = tiny_reference(llama)
    bench = Stepper(llama, cache={"tokens": 256, "page_size": page}, engine={"overlap": overlap})
    bench.submit("first", HELD, greedy(6), hold="h")
    bench.finish()
    turn = [*HELD, *bench.tokens("first"), 7, 8, 9]
    for steps in range(8):
        bench.events.clear()
        bench.submit("doomed", [*turn, 11, 12, 13, 14], greedy(30), hold="h")
        bench.submit("long", [*turn, *range(10, 300)], greedy(6), hold="h")
        for _ in range(steps):
            bench.step()
        bench.core.abort_now("doomed")
        bench.submit("other", OTHERS[steps], greedy(4))
        bench.finish()
        (refused,) = bench.of("long")
        assert refused.error is not None
        assert refused.error.kind == "context_length_exceeded"
        bench.submit("again", turn, greedy(6), salt=None)
        bench.finish()
        assert_same(bench.tokens("again"), *reference.greedy(turn, 6))
        assert bench.of("again")[-1].usage.cached_tokens >= (len(HELD) + 5) // page * page
    assert bench.core.stats()["holds"]["count"] == 1


def test_holds_of_many_forks_share_what_they_share(llama: Path) -> None:
    with engine(llama) as running:
        texts = [[*HELD, 100 + i] for i in range(8)]
        for i, prompt in enumerate(texts):
            running.generate(prompt, greedy(1), hold=f"{i}", group="g")
        assert running.stats()["holds"]["tokens"] == len(HELD) + 8
        running.flush_cache()
        assert running.stats()["holds"]["count"] == 0
        assert running.stats()["groups"][0]["free"] == 4096


def test_the_first_of_several_choices_is_held(llama: Path) -> None:
    with engine(llama) as running:
        params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
        result = running.generate(HELD, params, hold="a")
        assert running.stats()["holds"]["tokens"] == len(HELD) + 5
        later = running.generate([*HELD, *result.token_ids, 5], greedy(1), hold="a")
        assert later.usage.cached_tokens >= len(HELD) + 5


def test_a_scoring_call_holds_its_prompt(llama: Path) -> None:
    with engine(llama) as running:
        running.score(HELD, [[1, 2], [3]], hold="a")
        assert running.stats()["holds"]["tokens"] == len(HELD)


def test_a_hold_stays_in_its_namespace(llama: Path) -> None:
    with engine(llama, cache={"tokens": 512}) as running:
        running.generate(HELD, greedy(2), hold="a", salt="x")
        assert running.generate(HELD, greedy(2), salt="y").usage.cached_tokens == 0
        for other in OTHERS:
            running.generate(other, greedy(2))
        assert running.generate(HELD, greedy(2), salt="x").usage.cached_tokens == len(HELD) - 1


def test_no_share_means_no_hold(llama: Path) -> None:
    with engine(llama, schedule={"hold_share": 0.0}) as running:
        running.generate(HELD, greedy(2), hold="a")
        assert running.stats()["holds"]["count"] == 0
    with engine(llama, cache={"use": "chunk"}) as running:
        running.generate(HELD, greedy(2), hold="a")
        assert running.stats()["holds"]["count"] == 0


def test_an_engine_closes_with_holds(llama: Path) -> None:
    running = engine(llama)
    running.generate(HELD, greedy(2), hold="a")
    stream = running.stream(OTHERS[0], greedy(200), hold="b")
    next(stream)
    running.close()
    assert running.core.stats()["holds"]["count"] == 1  # an aborted call leaves none
    running.core.check()


def test_many_programs_in_a_small_pool(llama: Path) -> None:
    """Forks, turns and selections with holds, under pressure throughout: slots add up after every step."""
    reference = tiny_reference(llama)
    with engine(llama, cache={"tokens": 320, "page_size": 4}) as running:
        for turn, i in itertools.product(range(3), range(6)):
            prompt = [*OTHERS[i][:30], *range(300, 300 + 8 * turn)]
            result = running.generate(prompt, greedy(6), group=f"{i}", hold=f"{i}")
            assert_same(result.token_ids, *reference.greedy(prompt, 6))
            running.score(prompt, [[5, 6], [5, 7], [8]], group=f"{i}", hold=f"{i}")
        stats = running.stats()
        assert stats["holds"]["tokens"] <= 160
        assert stats["holds"]["revoked"] > 0
        assert stats["retractions"] == 0


def test_the_default_model(smollm2_path: str) -> None:
    with Engine(smollm2_path, cache={"tokens": 2048}, grammar="none", engine={"check": True}) as running:
        root = running.tokenizer.encode("The tree")
        texts = [[*root, *running.tokenizer.encode(f" number {i} is")] for i in range(3)]
        plain = [running.generate(text, greedy(4), salt="plain").token_ids for text in texts]
        before = running.stats()["prefill_tokens"]
        results = running.generate(texts, greedy(4), group="g")
        assert running.stats()["prefill_tokens"] - before == minimum(texts)
        assert [result.token_ids for result in results] == plain
