"""The model process and its supervisor, with a real child process that runs the echo engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.errors import EngineDeadError, PhloemError, RequestError
from phloem.messages import Event, GenerateCall
from phloem.params import SamplingParams
from phloem.server import supervisor as module
from phloem.server.remote import RemoteService
from phloem.server.supervisor import Patience, Supervisor

ECHO = (sys.executable, str(Path(__file__).with_name("echo.py")))
FAST = Patience(heartbeat_s=0.1, hang_s=1.0, max_restarts=2)


def call(call_id: str, prompt: list[int], **params: Any) -> GenerateCall:
    return GenerateCall(call_id=call_id, prompt=prompt, params=SamplingParams(**params))


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


async def collect(service: RemoteService, wanted: GenerateCall) -> list[Event]:
    return [event async for event in service.submit(wanted)]


def supervised(test: Callable[[Supervisor, RemoteService], Any], *, wait: bool = True, **config: Any) -> int:
    """Run a test beside a supervisor; returns the supervisor's status. No process is left afterwards."""

    async def inner() -> int:
        service = RemoteService()
        supervisor = Supervisor(service, config, FAST, ECHO)
        running = asyncio.create_task(supervisor.run())
        if wait:
            await until(lambda: supervisor.ready)
        try:
            await test(supervisor, service)
        finally:
            await supervisor.stop()
        status = await running
        assert supervisor.process is not None
        assert supervisor.process.pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(supervisor.process.pid, 0)
        return status

    return asyncio.run(asyncio.wait_for(inner(), 120))


def test_calls_go_through_and_stop_is_clean() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        events = await collect(service, call("x", [69, 70], max_tokens=3, n=2))
        assert {event.index for event in events} == {0, 1}
        assert "".join(event.text for event in events if event.index == 1) == "bcb"
        assert service.info.model_name == "echo"
        assert service.tokenizer.decode([69]) == "b"
        assert (await service.stats())["steps"] >= 3
        await service.flush_cache()
        with pytest.raises(RequestError, match="exceeds the limit of 256"):
            await collect(service, call("y", [69], max_tokens=1000))
        assert supervisor.health()[0]

    assert supervised(test) == 0


def test_leaving_a_stream_aborts_the_call() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        stream = service.submit(call("x", [69], max_tokens=200))
        await anext(stream)
        assert not await service.abort("xx")
        await stream.aclose()
        assert not await service.abort("x")
        stats = await service.stats()
        assert stats["running"] == 0
        assert stats["groups"][0]["leased"] == 0

    supervised(test, step_s=0.02)


def test_a_name_used_again_at_once_is_a_new_call() -> None:
    """The end of an aborted call is still on its way when its name is taken by the next one."""

    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        for _ in range(5):
            stream = service.submit(call("x", [69], max_tokens=200))
            await anext(stream)
            await stream.aclose()
        events = await collect(service, call("x", [69, 70], max_tokens=3, n=2))
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"] * 2
        assert {event.call_id for event in events} == {"x"}
        with pytest.raises(RequestError):
            await collect(service, call("y", [69], max_tokens=1000, n=3))
        assert not service._left, "what has ended is forgotten"
        assert (await service.stats())["running"] == 0

    supervised(test, step_s=0.02)


def test_a_killed_process_fails_its_calls_and_comes_back() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        tasks = [asyncio.create_task(collect(service, call(str(i), [69], max_tokens=200))) for i in range(20)]
        await until(lambda: service.beat is not None and service.beat.steps > 2)
        assert supervisor.process is not None
        first = supervisor.process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="died; it is being restarted"):
                await task
        assert not supervisor.health()[0]
        with pytest.raises(EngineDeadError, match="restarted"):
            await collect(service, call("new", [69], max_tokens=1))
        assert service.tokenizer.decode([69]) == "b", "what needs no model still works"
        await until(lambda: supervisor.ready)
        assert supervisor.process.pid != first
        assert supervisor.restarts == 1
        assert len(await collect(service, call("new", [69], max_tokens=2))) == 2

    assert supervised(test, step_s=0.01) == 0


def test_a_call_that_kills_every_process_ends_in_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.05)

    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        while supervisor.failure is None:
            if supervisor.ready:
                with pytest.raises(EngineDeadError):
                    await collect(service, call("poison", [13], max_tokens=2))
            await asyncio.sleep(0.02)
        assert supervisor.restarts == FAST.max_restarts
        assert "killed by SIGKILL" in supervisor.failure
        healthy, detail = supervisor.health()
        assert (healthy, detail["status"], detail["restarts"]) == (False, "failed", 2)

    assert supervised(test, die_on=13) == 1


def test_an_error_that_the_user_must_mend_is_not_retried() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        await until(lambda: supervisor.failure is not None)
        assert supervisor.restarts == 0
        assert supervisor.failure is not None
        assert "exited with status 1: the weights are gone\n  hint: choose another" in supervisor.failure

    assert supervised(test, wait=False, fail="the weights are gone") == 1


def test_a_crash_at_start_is_retried_and_reported_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.05)

    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        await until(lambda: supervisor.failure is not None)
        assert supervisor.restarts == 2
        assert supervisor.failure is not None
        assert "RuntimeError: out of luck" in supervisor.failure

    assert supervised(test, wait=False, crash="out of luck") == 1


def test_a_process_that_dies_silently_is_quoted() -> None:
    async def inner() -> None:
        program = "import sys; print('some'); print('last words', file=sys.stderr); sys.exit(7)"
        supervisor = Supervisor(RemoteService(), {}, Patience(max_restarts=0), (sys.executable, "-c", program))
        assert await supervisor.run() == 7
        assert supervisor.failure is not None
        assert "exited with status 7" in supervisor.failure
        assert "| some" in supervisor.failure
        assert "| last words" in supervisor.failure

    asyncio.run(asyncio.wait_for(inner(), 30))


def test_health_during_a_long_step_and_of_a_stuck_engine() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        task = asyncio.create_task(collect(service, call("long", [69], max_tokens=1)))
        await until(lambda: service.beat is not None and service.beat.stalled_s > 0.2)
        healthy, detail = supervisor.health()
        assert healthy, "a step takes long, but the process is alive"
        assert detail["stalled_s"] > 0.2
        await until(lambda: not supervisor.health()[0])
        assert supervisor.health()[1]["status"] == "hung"
        assert await task
        await until(lambda: supervisor.health()[0])

    supervised(test, step_s=2.0)


def test_idle_time_does_not_count_as_a_stall() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        await asyncio.sleep(2 * FAST.hang_s)
        task = asyncio.create_task(collect(service, call("x", [69], max_tokens=3)))
        while not task.done():
            assert supervisor.health()[0]
            await asyncio.sleep(0.02)

    supervised(test, step_s=0.1)


def test_a_stopped_process_is_unhealthy_without_being_asked() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        assert supervisor.process is not None
        assert supervisor.process.pid is not None
        os.kill(supervisor.process.pid, signal.SIGSTOP)
        await until(lambda: not supervisor.health()[0])
        assert supervisor.health()[1]["status"] == "hung"
        os.kill(supervisor.process.pid, signal.SIGCONT)
        await until(lambda: supervisor.health()[0])

    supervised(test)


def test_a_signal_for_the_whole_group_leaves_the_process_to_its_parent() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        assert supervisor.process is not None
        assert supervisor.process.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(supervisor.process.pid, number)
        assert len(await collect(service, call("x", [69], max_tokens=5))) == 5

    supervised(test, step_s=0.02)


def test_no_orphan_survives_its_parent() -> None:
    program = f"""
import asyncio, sys
from phloem.server.remote import RemoteService
from phloem.server.supervisor import Supervisor
def tell(_):
    print(supervisor.process.pid, flush=True)
supervisor = Supervisor(RemoteService(), {{}}, command={ECHO!r}, on_ready=tell)
asyncio.run(supervisor.run())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < end, "the model process outlived its parent"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_stopping_ends_a_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 30.0)

    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        assert supervisor.process is not None
        assert supervisor.process.pid is not None
        os.kill(supervisor.process.pid, signal.SIGKILL)
        await until(lambda: not supervisor.ready)

    started = time.monotonic()
    assert supervised(test) == 0
    assert time.monotonic() - started < 20


def test_stopping_while_loading_kills_at_once() -> None:
    for pause in (0.0, 0.3):

        async def test(supervisor: Supervisor, service: RemoteService, pause: float = pause) -> None:
            await asyncio.sleep(pause)

        started = time.monotonic()
        assert supervised(test, wait=False, load_s=60.0) == 0
        assert time.monotonic() - started < 20


def test_an_error_inside_a_question_comes_back() -> None:
    async def test(supervisor: Supervisor, service: RemoteService) -> None:
        with pytest.raises(PhloemError, match="AttributeError"):
            await service._ask("check")  # the echo engine has no such method
        assert (await service.stats())["running"] == 0

    supervised(test)
