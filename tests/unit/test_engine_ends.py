"""Questions to an engine that is not there (any more): answered with an error, never waited for."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phloem import Engine
from phloem.errors import EngineDeadError


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(str(tiny_model("llama")), engine={"threads": 1}, cache={"tokens": 512}) as engine:
        yield engine


def hold_up(engine: Engine) -> threading.Event:
    """Make the loop wait until the event is set."""
    go = threading.Event()
    engine.invoke(lambda _: go.wait(60))
    return go


def test_a_service_of_a_closed_engine_says_so(engine: Engine) -> None:
    service = engine.service()
    engine.close()
    for question in (service.stats, service.flush_cache):
        with pytest.raises(EngineDeadError):
            asyncio.run(asyncio.wait_for(question(), 30))


def test_a_question_that_the_end_overtakes_is_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, go = threading.Event(), threading.Event()

    def close() -> None:
        ending.set()
        go.wait(60)

    monkeypatch.setattr(engine.core.parts.executor, "close", close)
    engine.core.stop()
    assert ending.wait(60)
    late = engine.invoke(lambda core: core.stats())
    go.set()
    with pytest.raises(EngineDeadError):
        late.result(30)


def test_a_question_that_is_withdrawn_hurts_nobody(engine: Engine) -> None:
    service = engine.service()

    async def ask_and_leave() -> None:
        asked = asyncio.ensure_future(service.stats())
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    go = hold_up(engine)
    asyncio.run(ask_and_leave())
    go.set()
    assert engine.stats()["running"] == 0


def test_an_import_that_fails_is_raised(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phloem.loop", None)
    with pytest.raises(ImportError):
        Engine(str(tiny_model("llama")))
