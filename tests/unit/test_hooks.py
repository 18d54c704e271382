"""Observers: baked once, in the configuration's order; one that raises is named, then switched off; none is free."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from phloem.batch import StepStats
from phloem.errors import PluginError
from phloem.hooks import MAX_ERRORS, ObserverSet, hookimpl
from phloem.interfaces import PluginContext
from phloem.plugins.observer.jsonl import JsonlObserver
from phloem.testing import FakeObserver
from phloem.testing.observer import INFO
from phloem.testing.schedule import waiting_request


def fake() -> FakeObserver:
    return FakeObserver(FakeObserver.Options(), PluginContext("observer", "fake"))


class Recorder:
    """Writes its name into a shared list; takes fewer arguments than the hook has."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    @hookimpl
    def step(self) -> None:
        self.calls.append(self.name)


class Failing:
    """Raises in every step."""

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def step(self, stats: StepStats) -> None:
        self.calls += 1
        raise RuntimeError("the disk is full")


def test_a_life_is_observed() -> None:
    observer = fake()
    observers = ObserverSet([("fake", observer)])
    stats = StepStats(step=3)
    request = waiting_request(0, prompt=5)
    request.tokens.extend([7, 8])
    request.cached_tokens, request.finish_reason = 4, "length"
    observers.start(INFO)
    observers.step(stats)
    observers.request(request)
    observers.stop()
    assert [hook for hook, _ in observer.seen] == ["start", "step", "request", "stop"]
    assert observer.seen[0][1] is INFO
    assert observer.seen[1][1] is stats
    summary = observer.seen[2][1]
    assert (summary.id, summary.finish_reason, summary.queue_to_first_token_s) == ("call0/0", "length", None)
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (5, 2, 4)


def test_order_is_the_configurations() -> None:
    calls: list[str] = []
    observers = ObserverSet([(name, Recorder(name, calls)) for name in ("b", "a", "c")])
    observers.step(StepStats())
    assert calls == ["b", "a", "c"]


def test_one_that_raises_is_named_then_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    failing, good = Failing(), fake()
    observers = ObserverSet([("leaky", failing), ("good", good)])
    with caplog.at_level(logging.ERROR, logger="phloem.hooks"):
        for step in range(MAX_ERRORS + 5):
            observers.step(StepStats(step=step))
    assert failing.calls == MAX_ERRORS
    assert len(good.seen) == MAX_ERRORS + 5
    assert "observer 'leaky' raised in step (1 of 3)" in caplog.messages
    assert caplog.messages[-1] == "observer 'leaky' is switched off"
    assert "the disk is full" in caplog.text


def test_two_of_a_kind_fail_apart() -> None:
    one, two = Failing(), Failing()
    observers = ObserverSet([("same", one), ("same", two)])
    for _ in range(9):
        observers.step(StepStats())
    assert (one.calls, two.calls) == (MAX_ERRORS, MAX_ERRORS)


def test_nobody_listens_nothing_is_made() -> None:
    observers = ObserverSet([])
    request: Any = object()  # no summary is made of it
    observers.request(request)
    observers.step(StepStats())


def test_misspelt_hook() -> None:
    class Misspelt:
        @hookimpl
        def stepp(self) -> None: ...

    with pytest.raises(
        PluginError, match=r"observer 'typo' implements 'stepp', no such hook \(did you mean 'step'\?\)"
    ):
        ObserverSet([("typo", Misspelt())])


def test_misspelt_argument() -> None:
    class Misspelt:
        @hookimpl
        def step(self, statz: StepStats) -> None: ...

    with pytest.raises(PluginError, match=r"observer 'typo': .*'statz'"):
        ObserverSet([("typo", Misspelt())])


def test_no_hook_at_all() -> None:
    with pytest.raises(PluginError, match="observer 'mute' has no hook") as error:
        ObserverSet([("mute", object())])
    assert "hookimpl" in str(error.value)


def test_wrappers_are_refused() -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def step(self, stats: StepStats) -> Any:
            return (yield)

    with pytest.raises(PluginError, match="hooks cannot be wrappers"):
        ObserverSet([("wrap", Wrapper())])


def test_jsonl_writes_a_line_per_step_and_request(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    options = JsonlObserver.Options(path=str(path))
    observers = ObserverSet([("jsonl", JsonlObserver(options, PluginContext("observer", "jsonl")))])
    observers.start(INFO)
    observers.step(StepStats(step=1, forward_tokens=9, plan_s=0.25, build_s=0.5))
    request = waiting_request(4)
    request.finish_reason = "abort"
    observers.request(request)
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # readable before the end
    assert [line["event"] for line in lines] == ["start", "step", "request"]
    assert (lines[1]["forward_tokens"], lines[1]["host_s"]) == (9, 0.75)
    assert (lines[2]["id"], lines[2]["finish_reason"]) == ("call4/0", "abort")
    observers.stop()


def test_jsonl_options_and_missing_folder(tmp_path: Path) -> None:
    options = JsonlObserver.Options(path=str(tmp_path / "quiet.jsonl"), steps=False, requests=False)
    observer = JsonlObserver(options, PluginContext("observer", "jsonl"))
    observer.start(INFO)
    observer.step(StepStats())
    observer.stop()
    assert len((tmp_path / "quiet.jsonl").read_text().splitlines()) == 1
    with pytest.raises(PluginError, match=r"there is no folder .*nowhere"):
        JsonlObserver(JsonlObserver.Options(path=str(tmp_path / "nowhere" / "x")), PluginContext("observer", "jsonl"))
