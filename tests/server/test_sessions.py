"""Sessions: a conversation's path stays in the cache between its turns, over every route, and is no other tenant's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from phloem import Engine, SamplingParams
from phloem.interfaces import PluginContext
from phloem.plugins.api.native import NativeApi
from phloem.plugins.api.openai import OpenAIApi
from tests.in_process import on_engine

Client = httpx.AsyncClient
HELLO = [{"role": "user", "content": "When in the course of events it becomes necessary"}]
SYSTEM = "The quick brown fox jumps over the lazy dog while the other foxes sleep, and the dogs sleep."


def real(folder: Path, **sections: Any) -> AbstractAsyncContextManager[tuple[Client, Engine]]:
    """A client of an engine of this process."""
    openai = OpenAIApi(OpenAIApi.Options(), PluginContext("api", "openai", extras={"parsers": {}}))
    native = NativeApi(NativeApi.Options(), PluginContext("api", "native"))
    return on_engine(folder, [openai, native], **{"cache": {"tokens": 512}} | sections)


async def post(client: Client, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def crowd(engine: Engine) -> None:
    """Other requests, one after the other, fill the pool twice over."""
    for i in range(20):
        await engine.agenerate([5 + i, *range(100, 160)], SamplingParams(max_tokens=2, ignore_eos=True))


def holds(engine: Engine) -> int:
    return int(engine.stats()["holds"]["count"])


@pytest.mark.parametrize("kept", [True, False])
def test_the_next_turn_of_a_session_finds_its_path(tiny_model: Callable[[str], Path], kept: bool) -> None:
    """Through a crowd that evicts everything else; without a session it is gone."""

    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            more: dict[str, Any] = {"session": "visitor"} if kept else {}
            first = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
            turns: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, *HELLO]
            before = 0
            for turn in range(3):
                answer = await post(client, "/v1/chat/completions", messages=turns, **first)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                if turn:
                    assert (cached >= before) == kept, (cached, before)
                before = answer["usage"]["prompt_tokens"] - 8
                turns += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
                await crowd(engine)
            assert holds(engine) == kept
            assert await post(client, "/end_session", session="visitor") == {"ended": kept}
            assert await post(client, "/end_session", session="visitor") == {"ended": False}
            assert holds(engine) == 0

    asyncio.run(test())


def test_every_route_takes_one(tiny_model: Callable[[str], Path]) -> None:
    """And a stream does; a name is one session in all of them, within its salt and adapter."""

    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            few = {"max_tokens": 2, "session": "a"}
            await post(client, "/v1/chat/completions", messages=HELLO, **few)
            await post(client, "/v1/completions", prompt="The sugar", **few, n=2)
            await post(client, "/generate", text="The sugar", session="a", sampling_params={"max_tokens": 2, "n": 2})
            assert holds(engine) == 1
            streamed = await client.post(
                "/v1/completions", json={"prompt": "a leaf", **few, "stream": True} | {"session": "b"}
            )
            assert "[DONE]" in streamed.text
            await post(client, "/v1/completions", prompt="The sugar", **few, cache_salt="mine")
            await post(
                client, "/generate", text="The sugar", session="a", salt="mine", sampling_params={"max_tokens": 2}
            )
            await post(client, "/generate", text="The sugar", session='a", "mine', sampling_params={"max_tokens": 2})
            assert holds(engine) == 4
            assert await post(client, "/end_session", session="a", salt="other") == {"ended": False}
            assert await post(client, "/end_session", session="a", salt="mine") == {"ended": True}
            assert holds(engine) == 3
            assert await post(client, "/end_session", session="b") == {"ended": True}

    asyncio.run(test())


def test_a_session_ends_when_nobody_uses_it(tiny_model: Callable[[str], Path]) -> None:
    async def test() -> None:
        async with real(tiny_model("llama"), schedule={"hold_idle_s": 0.3}) as (client, engine):
            await post(client, "/v1/completions", prompt="The sugar", max_tokens=2, session="a")
            assert holds(engine) == 1
            end = time.monotonic() + 10
            while holds(engine):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert engine.stats()["holds"]["expired"] == 1

    asyncio.run(test())


def test_a_session_may_end_sooner(tiny_model: Callable[[str], Path]) -> None:
    """Over every route, within what the server allows."""

    async def test() -> None:
        async with real(tiny_model("llama"), schedule={"hold_idle_s": 60}) as (client, engine):
            own = {"session_idle_s": 0.2}
            await post(client, "/v1/completions", prompt="The sugar", max_tokens=2, session="stays")
            await post(client, "/v1/completions", prompt="The sugar", max_tokens=2, session="a", **own)
            await post(client, "/v1/chat/completions", messages=HELLO, max_tokens=2, session="b", **own)
            await post(client, "/generate", text="a leaf", session="c", sampling_params={"max_tokens": 2}, **own)
            end = time.monotonic() + 10
            while holds(engine) > 1:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert engine.stats()["holds"]["expired"] == 3
            for more, said in (
                ({"session": "a", "session_idle_s": 61}, "must be above 0 and at most 60, got 61"),
                ({"session": "a", "session_idle_s": 0}, "must be above 0 and at most 60, got 0"),
                ({"session_idle_s": 1.0}, "session_idle_s needs a session"),
            ):
                answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **more})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "session_idle_s")
                assert said in error["message"]

    asyncio.run(test())


def test_an_aborted_or_failed_turn_leaves_the_last_one(tiny_model: Callable[[str], Path]) -> None:
    """what-breaks 25: the held path is that of the last turn that ended well."""

    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            await post(client, "/generate", text="The sugar", session="a", sampling_params={"max_tokens": 2})
            held = engine.stats()["holds"]
            long = {"text": "The sugar a leaf makes", "session": "a", "rid": "one"}
            params = {"max_tokens": 400, "ignore_eos": True}
            going = asyncio.create_task(client.post("/generate", json={**long, "sampling_params": params}))
            while not engine.stats()["running"]:
                await asyncio.sleep(0.01)
            going.cancel()
            while engine.stats()["running"]:
                await asyncio.sleep(0.01)
            too_long = await client.post("/generate", json={"input_ids": [7] * 600, "session": "a"})
            assert too_long.status_code == 400
            assert engine.stats()["holds"] == held

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "session": "a"}, "a session is one conversation, got 2 prompts"),
        ("/generate", {"text": ["a", "b"], "session": "a"}, "a session is one conversation, got 2 prompts"),
        ("/v1/completions", {"prompt": "a", "session": ""}, "must have 1 to 256 characters, got 0"),
        ("/generate", {"text": "a", "session": "x" * 257}, "must have 1 to 256 characters, got 257"),
        ("/v1/chat/completions", {"messages": HELLO, "session": 5}, "session"),
        ("/end_session", {"session": ""}, "must have 1 to 256 characters"),
    ],
)
def test_what_is_no_session_is_refused(run: Callable[..., Any], path: str, body: dict[str, Any], message: str) -> None:
    async def test(client: Client, *_: Any) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "session"

    run(test)


def test_a_cache_that_does_not_share_refuses_sessions(tiny_model: Callable[[str], Path]) -> None:
    async def test() -> None:
        async with real(tiny_model("llama"), cache={"use": "chunk", "tokens": 512}) as (client, engine):
            for path, body in (
                ("/v1/chat/completions", {"messages": HELLO}),
                ("/v1/completions", {"prompt": "a"}),
                ("/generate", {"text": "a"}),
                ("/end_session", {}),
            ):
                answer = await client.post(path, json={**body, "session": "a"})
                assert answer.status_code == 400
                assert "this server's cache finds no prefix again" in answer.json()["error"]["message"]
            await post(client, "/v1/completions", prompt="a", max_tokens=1)
            assert holds(engine) == 0

    asyncio.run(test())
