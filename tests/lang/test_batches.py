"""Many programs at once: batches with failures, awaited programs by the thousand, streams of async bodies."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted

import phloem.lang as pl
from phloem import Engine
from phloem.errors import RequestError


@pl.function
def numbered(s: Any, i: int) -> int:
    s += f"{i} " + ("fail" if i % 5 == 0 else "") + pl.gen("x", max_tokens=i + 1)
    if i % 7 == 0:
        raise ZeroDivisionError(i)
    return i


def test_a_batch_of_500_with_failures(backend: Scripted) -> None:
    """Failing gens and failing bodies: each state tells of its own, the others are whole."""
    states = numbered.run_batch([{"i": i} for i in range(500)], backend=backend, num_threads=16)
    assert len(states) == 500
    for i, state in enumerate(states):
        if i % 7 == 0:  # the gen may have failed by then
            assert isinstance(state.error(), (ZeroDivisionError, RequestError))
        elif i % 5 == 0:
            assert isinstance(state.error(), RequestError)
        else:
            assert (state["x"], state.ret_value, state.error()) == (f"[0:{i + 1}]", i, None)
    assert backend.most_running <= 16


def test_a_wrong_argument_fails_its_item_only(backend: Scripted) -> None:
    states = numbered.run_batch([{"i": 1}, {"j": 2}, (3,), ()], backend=backend)
    assert [type(state.error()) for state in states] == [type(None), TypeError, type(None), TypeError]
    with pytest.raises(RequestError, match="list of arguments"):
        numbered.run_batch({"i": 1}, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"batch_kwargs\[1\] is 'ab'"):
        numbered.run_batch([(1,), "ab"], backend=backend)
    with pytest.raises(RequestError, match=r"batch_kwargs\[0\] is 1"):
        numbered.run_batch([1, 2], backend=backend)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="num_threads"):
        numbered.run_batch([{"i": 1}], backend=backend, num_threads=0)
    assert numbered.run_batch([], backend=backend) == []


def test_generator_style_keeps_the_order_or_does_not(backend: Scripted) -> None:
    @pl.function
    async def sleeper(s: Any, i: int) -> int:
        await asyncio.sleep(0.3 if i == 0 else 0.0)
        s += f"{i}"
        return i

    items = [{"i": i} for i in range(4)]
    kept = sleeper.run_batch(items, backend=backend, generator_style=True)
    assert [state.ret_value for state in kept] == [0, 1, 2, 3]
    loose = sleeper.run_batch(items, backend=backend, generator_style=True, ordered=False)
    assert [state.ret_value for state in loose][-1] == 0


def test_leaving_a_generator_early_cancels_the_rest(backend: Scripted) -> None:
    @pl.function
    def program(s: Any, i: int) -> None:
        s += ("hang" if i else "fine") + pl.gen("x", max_tokens=1)
        s.sync()

    states = program.run_batch([{"i": i} for i in range(8)], backend=backend, generator_style=True)
    assert next(states)["x"] == "[0:1]"
    states.close()
    deadline = time.monotonic() + 20
    while backend.open and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_progress_bar_counts(backend: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    numbered.run_batch([{"i": i} for i in (1, 2, 3)], backend=backend, progress_bar=True)
    assert "3/3" in capsys.readouterr().err


def test_async_bodies_hold_no_threads(backend: Scripted) -> None:
    """1,000 programs side by side, each with a fork: not one thread more."""
    backend.delay_s = 0.05
    before = threading.active_count()
    most = before

    @pl.function
    async def program(s: Any, i: int) -> str:
        nonlocal most
        s += f"{i}" + pl.gen("x", max_tokens=1)
        forks = s.fork(2)
        forks += lambda j: f"{j}" + pl.gen("y", max_tokens=j + 1)
        forks.join()
        most = max(most, threading.active_count())
        return f"{await s.get('x')} {await s.get('y')}"

    async def main() -> list[Any]:
        return await asyncio.gather(*(program.arun(i, backend=backend) for i in range(1000)))

    states = asyncio.run(main())
    assert {state.ret_value for state in states} == {"[0:1] ['[0:1]', '[0:2]']"}
    assert most == before
    assert backend.most_running >= 1000


def test_awaited_plain_bodies_and_async_batches(backend: Scripted) -> None:
    async def main() -> None:
        state = await numbered.arun(1, backend=backend)
        assert state["x"] == "[0:2]"
        with pytest.raises(ZeroDivisionError):
            await numbered.arun(7, backend=backend)
        states = await numbered.arun_batch([{"i": i} for i in range(1, 5)], backend=backend)
        assert [state.ret_value for state in states] == [1, 2, 3, 4]

    asyncio.run(main())


def test_async_iteration_and_reports(backend: Scripted) -> None:
    @pl.function
    async def program(s: Any) -> None:
        s += "a" + pl.gen("x", max_tokens=1) + "b"
        assert await s.async_text() == "a[0:1]b"
        assert (await s.get_meta("x"))["finish_reason"] == {"type": "length"}
        assert await s.settled() is None

    async def main() -> None:
        state = await program.arun(backend=backend, stream=True)
        text, last = "", {}
        async for piece, report in state.text_async_iter("x", return_meta_data=True):
            text, last = text + piece, report
        assert text == "[0:1]"
        assert last["finish_reason"] == {"type": "length"}
        assert "".join([piece async for piece in state.text_async_iter()]) == "a[0:1]b"

    asyncio.run(main())
    assert "".join(program.run(backend=backend, stream=True).text_iter()) == "a[0:1]b"


def test_cancelling_an_awaited_program_releases_everything(backend: Scripted) -> None:
    @pl.function
    async def program(s: Any) -> None:
        forks = s.fork(3)
        forks += "hang" + pl.gen("x")
        await forks[0].get("x")

    async def main() -> None:
        task = asyncio.ensure_future(program.arun(backend=backend))
        while backend.running < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.open == 0

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
def test_a_loop_ends_though_a_stream_was_left(backend: Scripted, plain: bool, turns: int) -> None:
    """However far the run has come when `asyncio.run` cancels all that is left."""
    states: list[Any] = []

    async def awaited(s: Any) -> None:
        s += "a" + pl.gen("x", max_tokens=1)
        await s.get("x")

    async def main() -> None:
        states.append(
            await pl.function((lambda s: numbered(s, 1)) if plain else awaited).arun(backend=backend, stream=True)
        )
        for _ in range(turns):
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert states[0].branch.closed.done


def test_a_thousand_async_programs_on_an_engine(lang_model: Path) -> None:
    """All wait for one engine at once; each gets its own answer, and nothing is left locked."""

    @pl.function
    async def program(s: Any, i: int) -> int:
        s += f"The fox {i % 50} and"
        s += pl.gen("x", max_tokens=1, temperature=0)
        return len(await s.get("x"))

    async def main(engine: Engine) -> list[Any]:
        return await asyncio.gather(*(program.arun(i, backend=engine) for i in range(1000)))

    with Engine(str(lang_model), cache={"tokens": 8192}, engine={"threads": 1}) as engine:
        states = asyncio.run(main(engine))
        texts = [state["x"] for state in states]
        assert all(texts[i] == texts[i % 50] for i in range(1000))
        engine.check()
        assert engine.stats()["groups"][0]["leased"] == 0


def test_a_batch_of_500_on_an_engine(lang_model: Path) -> None:
    """A tenth asks for what the engine refuses."""

    @pl.function
    def program(s: Any, i: int) -> None:
        s += f"A tree {i}:" + pl.gen("x", max_tokens=2, stop_regex="(" if i % 10 == 0 else "z{3}")

    with Engine(str(lang_model), cache={"tokens": 8192}, engine={"threads": 1}) as engine:
        states = program.run_batch([{"i": i} for i in range(500)], backend=engine)
        for i, state in enumerate(states):
            assert isinstance(state.error(), RequestError if i % 10 == 0 else type(None))
            if i % 10:
                assert state.text() == f"A tree {i}:{state['x']}"
        engine.check()
        assert engine.stats()["groups"][0]["leased"] == 0
