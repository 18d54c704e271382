"""Programs made at random do what reading them in order would do, however they are run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted

import phloem.lang as pl
from phloem import Engine
from phloem.errors import RequestError
from phloem.lang.cell import Cancelled

Step = tuple[Any, ...]
NAMES, TOKENS, MODES = (
    st.sampled_from("xyz"),
    st.integers(1, 9),
    st.sampled_from(["gather_variable", "concate_and_append"]),
)
PLAIN = st.one_of(
    st.tuples(st.just("text"), st.sampled_from(["a", " b", "fail", "é"])),  # a gen after "fail" fails
    st.tuples(st.just("gen"), NAMES, TOKENS),
    st.tuples(st.just("select"), NAMES, st.sampled_from([("a", "bb"), ("longest", "l")])),
    st.tuples(st.just("role"), st.sampled_from(["user", "assistant"]), TOKENS),
    st.tuples(st.just("scope"), NAMES, TOKENS),
)


def programs(depth: int) -> st.SearchStrategy[list[Step]]:
    """Programs with forks nested at most so deep."""
    if depth == 0:
        return st.lists(PLAIN, max_size=4)
    fork = st.tuples(st.just("fork"), st.lists(programs(depth - 1), min_size=1, max_size=3), MODES)
    return st.lists(st.booleans().flatmap(lambda forks: fork if forks else PLAIN), max_size=5)


PROGRAMS = programs(3)


def write(s: Any, steps: list[Step]) -> None:
    """The program: it only appends, so it never waits."""
    for kind, what, *more in steps:
        if kind == "text":
            s += what
        elif kind == "gen":
            s += pl.gen(what, max_tokens=more[0])
        elif kind == "select":
            s += pl.select(what, more[0])
        elif kind == "role":
            with getattr(s, what)():
                s += pl.gen(max_tokens=more[0])
        elif kind == "scope":
            with s.var_scope(what):
                s += "in " + pl.gen(max_tokens=more[0])
        else:
            forks = s.fork(len(what))
            for branch, part in zip(forks, what, strict=True):
                write(branch, part)
            forks.join(more[0])


class Reading:
    """The same, one step after the other: text, variables (None: it failed), and whether a step has failed."""

    def __init__(self, parent: Reading | None = None) -> None:
        self.text = parent.text if parent is not None else ""
        self.failed = parent.failed if parent is not None else False
        self.start = len(self.text)
        self.own: dict[str, Any] = {}

    def read(self, steps: list[Step]) -> Reading:
        for kind, what, *more in steps:
            begin = len(self.text)
            if kind == "text":
                self.add(what)
            elif kind == "gen":
                self.gen(more[0])
                self.own[what] = self.since(begin)
            elif kind == "select":
                self.add(max(more[0], key=len))
                self.own[what] = self.since(begin)
            elif kind == "role":
                self.add(f"<{what}>")
                self.gen(more[0])
                self.add(f"</{what}>")
            elif kind == "scope":
                self.add("in ")
                self.gen(more[0])
                self.own[what] = self.since(begin)
            else:
                self.join([Reading(self).read(part) for part in what], more[0])
        return self

    def join(self, branches: list[Reading], mode: str) -> None:
        if mode == "gather_variable":
            for name in {name for branch in branches for name in branch.own}:
                self.own[name] = [branch.own.get(name) for branch in branches]
        for branch in branches if mode == "concate_and_append" else ():
            self.failed = self.failed or branch.failed
            self.add(branch.text[branch.start :])

    def add(self, text: str) -> None:
        self.text += "" if self.failed else text

    def gen(self, tokens: int) -> None:
        self.failed = self.failed or self.text.endswith("fail")
        self.add(f"[0:{tokens}]")

    def since(self, begin: int) -> str | None:
        return None if self.failed else self.text[begin:]


def value(state: Any, name: str) -> Any:
    """A variable's value; None where reading it raises the error that the backend was told to make."""
    try:
        return state[name]
    except RequestError:
        return None


def agrees(got: Any, expected: Any) -> bool:
    """A value is what it would be without cancellation, with None in place of what was cancelled."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(agrees, got, expected))
    return got is None or got == expected


@pytest.mark.parametrize("way", ["run", "stream", "async", "batch"])
@settings(max_examples=15, deadline=None)
@given(steps=PROGRAMS)
def test_random_programs(way: str, steps: list[Step]) -> None:
    backend = Scripted()
    plain = pl.function(lambda s: write(s, steps))

    @pl.function
    async def awaited(s: Any) -> None:
        write(s, steps)

    if way == "async":
        state = asyncio.run(awaited.arun(backend=backend))
    elif way == "batch":
        state = plain.run_batch([{}, {}], backend=backend)[1]
    else:
        state = plain.run(backend=backend, stream=way == "stream")
    expected = Reading().read(steps)
    for branch in state.branch.run.branches:  # of a stream
        branch.closed.wait(10)
    assert (state.error() is not None) == expected.failed
    assert {name: value(state, name) for name in expected.own} == expected.own
    if way == "stream" and not expected.failed:
        assert "".join(state.text_iter()) == expected.text
    assert state.text() == expected.text
    assert backend.open == 0


@settings(max_examples=25, deadline=None)
@given(
    steps=PROGRAMS, victims=st.lists(st.integers(0, 50), min_size=1, max_size=4), wait=st.sampled_from([0, 0, 0.002])
)
def test_cancelling_at_any_moment_leaves_the_rest_right(steps: list[Step], victims: list[int], wait: float) -> None:
    """Whatever was not cancelled comes out as ever; everything ends, and nothing stays open."""
    backend = Scripted(delay_s=0.001)

    @pl.function
    async def program(s: Any) -> None:
        write(s, steps)
        await asyncio.sleep(wait)
        branches = s.branch.run.branches
        for victim in victims:
            branches[victim % len(branches)].cancel()
            await asyncio.sleep(wait)

    async def main() -> Any:
        return await asyncio.wait_for(program.arun(backend=backend), 20)

    state = asyncio.run(main())
    expected = Reading().read(steps)
    for name, wanted in expected.own.items():
        try:
            assert agrees(value(state, name), wanted)
        except Cancelled:
            assert isinstance(state.error(), Cancelled)
    if state.error() is None:
        assert "concate_and_append" in repr(steps) or state.text() == expected.text
    assert backend.open == backend.running == 0


@settings(max_examples=8, deadline=None)
@given(steps=PROGRAMS, victims=st.lists(st.integers(0, 50), max_size=3))
def test_random_programs_leave_an_engine_as_it_was(lang_engine: Engine, steps: list[Step], victims: list[int]) -> None:
    """Slots, locks and holds all come back, with branches cancelled while the engine works on them."""

    @pl.function
    def program(s: Any) -> None:
        write(s, steps)
        for victim in victims:
            branches = s.branch.run.branches
            branches[victim % len(branches)].cancel()

    program.run(backend=lang_engine)
    lang_engine.check()
    stats = lang_engine.stats()
    assert (stats["running"], stats["waiting"], stats["holds"]["count"]) == (0, 0, 0)
    assert stats["groups"][0]["leased"] == 0


@pytest.fixture(scope="module")
def lang_engine(lang_model: Path) -> Iterator[Engine]:
    """One engine for all examples."""
    with Engine(str(lang_model), cache={"tokens": 4096}, engine={"threads": 1}) as engine:
        yield engine
