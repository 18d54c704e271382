"""/v1/programs on the echo engine: states, their turns, errors, expiry, streams; and on a real one what is computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from phloem import Engine, SamplingParams
from phloem.choosing import METHODS, choose, join
from phloem.interfaces import PluginContext
from phloem.plugins.api import _program_store
from phloem.plugins.api.program import ProgramApi
from tests.in_process import on_engine

Run = Callable[..., Any]
Client = httpx.AsyncClient
PROGRAMS = "/v1/programs"


async def made(client: Client, text: str | None = None, **body: Any) -> str:
    """The path of a new program."""
    answer = await client.post(PROGRAMS, json={"text": text, **body})
    assert answer.status_code == 200, answer.text
    return f"{PROGRAMS}/{answer.json()['id']}"


async def done(client: Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request that must succeed."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def shown(client: Client, path: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(path)).json()
    return found


def greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"sampling_params": {"max_tokens": count, "temperature": 0, **more}}


def deltas(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_program(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        path = await made(client, "abc", salt="mine")
        assert engine.core.seen == []
        assert (await done(client, f"{path}/append", text="de"))["length"] == 5
        first = await done(client, f"{path}/generate", name="x", **greedy(3, logprobs=1))
        assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("abc", "length", None)
        assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 1}
        assert [item["token"] for item in first["logprobs"]] == ["a", "b", "c"]
        await done(client, f"{path}/append", token_ids=first["token_ids"][:1])
        second = await done(client, f"{path}/generate", **greedy(9, stop=["ea"]), append=False)
        assert (second["text"], second["stop_reason"]) == ("abcd", "ea")
        state = await shown(client, path)
        assert state["text"] == "abcdeabca"
        assert engine.core.tokenizer.decode(state["token_ids"]) == "abcdeabca"
        assert state["variables"] == {"x": "abc"}
        calls = engine.core.seen
        assert {call.hold for call in calls} == {path.rpartition("/")[2]}
        assert {(call.group, call.salt) for call in calls} == {(calls[0].hold, "mine")}
        assert (await client.delete(path)).json() == {"ok": True}
        assert engine.core.dropped == [calls[0].hold]
        assert (await client.get(path)).status_code == 404

    run(test)


def test_a_program_is_made_with_its_first_operation(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        made = await done(client, PROGRAMS, text="ab", idle_s=9, generate={"text": "c", "name": "x", **greedy(2)})
        path = f"{PROGRAMS}/{made['id']}"
        assert (made["text"], made["finish_reason"], made["expires_s"]) == ("ab", "length", 9)
        state = await shown(client, path)
        assert (state["text"], state["variables"]) == ("abcab", {"x": "ab"})
        assert engine.core.seen[-1].hold == made["id"]
        assert (await done(client, f"{path}/generate", **greedy(2)))["text"] == "ab"
        chosen = await done(client, PROGRAMS, text="ab", select={"choices": ["c", "d"], "name": "y"})
        assert (await shown(client, f"{PROGRAMS}/{chosen['id']}"))["text"] == "ab" + chosen["choice"]
        split = await done(client, PROGRAMS, text="ab", fork={"n": 2, "text": "c"})
        texts = [(await shown(client, f"{PROGRAMS}/{one}"))["text"] for one in (split["id"], *split["ids"])]
        assert texts == ["abc"] * 3
        answer = await client.post(PROGRAMS, json={"text": "ab", "generate": {"stream": True, **greedy(3)}})
        first, *rest = deltas(answer)
        assert set(first) >= {"id", "expires_s", "text"}
        assert all("id" not in event for event in rest)
        written = "".join(event["text"] for event in (first, *rest))
        assert (await shown(client, f"{PROGRAMS}/{first['id']}"))["text"] == "ab" + written == "ababa"

    run(test)


def test_a_first_operation_that_fails_leaves_no_program(run: Run) -> None:
    async def test(client: Client, engine: Any, gate: Any) -> None:
        async def asked(stream: bool) -> httpx.Response:
            return await client.post(PROGRAMS, json={"text": "ab", "generate": {"stream": stream, **greedy(100)}})

        for stream in (False, True):
            refused = await client.post(PROGRAMS, json={"text": "ab", "generate": {"stream": stream, **greedy(1000)}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            going = asyncio.create_task(asked(stream))
            await asyncio.sleep(0.1)
            assert (await client.get(PROGRAMS)).json()["states"] == 1
            await client.post("/abort", json={"rid": engine.core.seen[-1].call_id.partition("~")[0]})
            answer = await going
            assert "aborted" in answer.text
            assert answer.status_code == (200 if stream else 499)
            assert (await client.get(PROGRAMS)).json()["states"] == 0
            gone = asyncio.create_task(asked(stream))
            await asyncio.sleep(0.1)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert await engine.settled()
            assert (await client.get(PROGRAMS)).json()["states"] == 0

    run(test, step_s=0.01)


def test_many_are_deleted_at_once_and_ids_may_be_the_clients(run: Run) -> None:
    mine = "a-client-has-chosen-me"

    async def test(client: Client, engine: Any, _: Any) -> None:
        going = asyncio.create_task(client.post(PROGRAMS, json={"id": mine, "text": "a", "generate": greedy(100)}))
        await asyncio.sleep(0.1)
        taken = await client.post(PROGRAMS, json={"id": mine, "text": "b"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "program_exists")
        others = [(await made(client, "a")).rpartition("/")[2] for _ in range(3)]
        kept, *ended = others
        await done(client, f"{PROGRAMS}/{ended[0]}/generate", **greedy(2))
        ids = [mine, *ended, ended[0], "program-nobody-knows"]
        assert (await client.post(f"{PROGRAMS}/delete", json={"ids": ids})).json() == {"deleted": 3}
        assert (await going).status_code == 499
        assert set(engine.core.dropped) == {mine, ended[0]}
        assert await engine.settled()
        assert [(await client.get(f"{PROGRAMS}/{one}")).status_code for one in others] == [200, 404, 404]
        assert (await client.post(f"{PROGRAMS}/delete", json={"ids": [kept]})).json() == {"deleted": 1}

    run(test, step_s=0.01)


def test_a_stop_string_ends_the_text_where_the_answer_ends(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        path = await made(client, "naïve 🙂 tree")
        answer = await done(client, f"{path}/generate", **greedy(30, stop=["tree"]))
        assert answer["text"] == "naïve 🙂 "
        await done(client, f"{path}/append", text="!")
        await done(client, f"{path}/generate", **greedy(1))
        assert engine.core.tokenizer.decode(engine.core.seen[-1].prompt) == "naïve 🙂 treenaïve 🙂 !"

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joins_to_the_whole(run: Run, n: int) -> None:
    async def test(client: Client, *_: Any) -> None:
        body = greedy(12, n=n, logprobs=0)
        whole = await done(client, f"{await made(client, 'größer 🙂')}/generate", **body)
        path = await made(client, "größer 🙂")
        events = deltas(await client.post(f"{path}/generate", json=body | {"stream": True, "name": "x"}))
        for index, choice in enumerate(whole.get("choices", [whole])):
            parts = [event for event in events if event["index"] == index]
            assert len(parts) > 2
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name in ("token_ids", "logprobs"):
                assert [item for part in parts for item in part[name]] == choice[name]
            assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert events[-1]["usage"] == whole["usage"]
        assert ("choices" in whole) == (n > 1)
        state = await shown(client, path)
        assert state["text"] == "größer 🙂" + whole["text"]
        assert state["variables"] == {"x": whole["text"]}

    run(test)


def test_select(run: Run) -> None:
    """The echo engine likes high token ids: letters late in the alphabet."""

    async def test(client: Client, engine: Any, _: Any) -> None:
        path = await made(client, "I say ")
        answer = await done(client, f"{path}/select", choices=["yes", "no", "zz"], name="said")
        assert (answer["choice"], answer["index"]) == ("zz", 2)
        assert [len(row) for row in answer["token_logprobs"]] == [3, 2, 2]
        assert answer["scores"] == [sum(row) / len(row) for row in answer["token_logprobs"]]
        assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "cached_tokens": 1}
        for method in METHODS:
            await done(client, f"{path}/select", choices=["a", "b", "bc"], method=method, append=False)
        drawn = {
            (await done(client, f"{path}/select", choices=["a", "b"], temperature=50, append=False))["choice"]
            for _ in range(40)
        }
        assert drawn == {"a", "b"}
        state = await shown(client, path)
        assert (state["text"], state["variables"]) == ("I say zz", {"said": "zz"})
        bare = [call for call in engine.core.seen if call.hold is None]
        assert [call.prompt for call in bare] == [engine.core.tokenizer.encode("b")]

    run(test)


def test_forks_go_their_own_ways(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        root = await made(client, "root", idle_s=50, priority=2)
        ids = (await done(client, f"{root}/fork", n=3))["ids"]
        branches = [f"{PROGRAMS}/{branch}" for branch in ids]
        for i, branch in enumerate(branches):
            await done(client, f"{branch}/append", text=f"{i}")
        await asyncio.gather(*(done(client, f"{branch}/generate", **greedy(2)) for branch in branches))
        assert [(await shown(client, b))["text"] for b in branches] == ["root0ro", "root1ro", "root2ro"]
        assert (await shown(client, root))["text"] == "root"
        assert len({call.group for call in engine.core.seen}) == 1
        assert {call.hold for call in engine.core.seen} == set(ids)
        assert {call.priority for call in engine.core.seen} == {2}
        assert (await shown(client, branches[0]))["idle_s"] == 50

    run(test)


def test_operations_of_one_state_take_turns_and_others_run_beside(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        path, other = await made(client, "a"), await made(client, "z")
        bodies = {"append": {"text": "b"}, "select": {"choices": ["c"]}, "fork": {"n": 1}, "generate": greedy(1)}
        work = [asyncio.create_task(done(client, f"{path}/generate", **greedy(30)))]
        for what, body in bodies.items():
            await asyncio.sleep(0.02)
            work.append(asyncio.create_task(done(client, f"{path}/{what}", **body)))
        await asyncio.sleep(0.02)
        assert (await shown(client, path))["busy"]
        await done(client, f"{other}/generate", **greedy(1))
        assert not any(task.done() for task in work)
        *_, fork, _ = await asyncio.gather(*work)
        assert (await shown(client, path))["text"] == "a" * 31 + "bc" + "a"
        assert (await shown(client, f"{PROGRAMS}/{fork['ids'][0]}"))["text"] == "a" * 31 + "bc"

    run(test, step_s=0.01)


def test_delete_while_generating(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        for stream in (False, True):
            path = await made(client, "a")
            going = asyncio.create_task(client.post(f"{path}/generate", json=greedy(200) | {"stream": stream}))
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(client.post(f"{path}/append", json={"text": "b"}))
            await asyncio.sleep(0.02)
            assert (await client.delete(path)).status_code == 200
            answer, late = await going, await waiting
            if stream:
                assert "its program was deleted" in answer.text
                assert "[DONE]" not in answer.text
            else:
                assert answer.status_code == 499
                assert "its program was deleted" in answer.json()["error"]["message"]
            assert late.status_code == 404
            assert await engine.settled()
            assert engine.core.dropped[-1] == path.rpartition("/")[2]

    run(test, step_s=0.01)


def test_an_aborted_or_failed_operation_leaves_the_state_as_it_was(run: Run) -> None:
    async def test(client: Client, engine: Any, gate: Any) -> None:
        path = await made(client, "ab")
        going = asyncio.create_task(client.post(f"{path}/generate", json=greedy(100)))
        await asyncio.sleep(0.1)
        await client.post("/abort", json={"rid": engine.core.seen[-1].call_id.partition("~")[0]})
        assert (await going).status_code == 499
        refused = await client.post(f"{path}/generate", json=greedy(1000))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        gone = asyncio.create_task(client.post(f"{path}/generate", json=greedy(100)))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await shown(client, path))["text"] == "ab"
        assert (await done(client, f"{path}/generate", **greedy(2)))["text"] == "ab"

    run(test, step_s=0.01)


def test_idle_states_expire(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_program_store, "SWEEP_S", 0.0)

    async def test(client: Client, engine: Any, _: Any) -> None:
        path, kept = await made(client, "a", idle_s=0.1), await made(client, "b")
        await done(client, f"{path}/generate", **greedy(30))  # takes longer than the idle time
        await asyncio.sleep(0.05)
        assert (await shown(client, path))["expires_s"] <= 0.1
        await asyncio.sleep(0.15)
        answer = await client.post(f"{path}/append", json={"text": "x"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "program_not_found"
        assert "expired" in error["message"]
        assert "restarted" in error["message"]
        assert engine.core.dropped == [path.rpartition("/")[2]]
        assert (await client.get(PROGRAMS)).json()["states"] == 1
        assert (await client.get(kept)).status_code == 200

    run(test, step_s=0.01)


def test_the_number_of_states_and_their_idle_time_are_options(run: Run) -> None:
    async def test(client: Client, *_: Any) -> None:
        path = await made(client, "a")
        answer = await client.post(f"{path}/fork", json={"n": 3})
        assert answer.status_code == 429
        assert "limit is 3" in answer.json()["error"]["message"]
        await done(client, f"{path}/fork", n=2)
        assert (await client.post(PROGRAMS, json={})).status_code == 429
        await client.delete(path)
        shown_s = (await client.get(await made(client))).json()["idle_s"]
        assert shown_s == 5
        refused = await client.post(PROGRAMS, json={"idle_s": 11})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idle_s")

    run(test, programs={"most": 3, "idle_s": 5, "max_idle_s": 10})
    with pytest.raises(ValueError, match="above max_idle_s"):
        ProgramApi.Options(idle_s=11, max_idle_s=10)


@pytest.mark.parametrize(
    ("what", "body", "param"),
    [
        ("", {"texts": "a"}, "texts"),
        ("", {"text": "a", "token_ids": [1]}, "token_ids"),
        ("", {"idle_s": 0}, "idle_s"),
        ("", {"idle_s": 1e9}, "idle_s"),
        ("", {"token_ids": [999]}, "token_ids"),
        ("", {"id": "short"}, "id"),
        ("", {"text": "a", "fork": {"n": 0}}, "n"),
        ("", {"text": "a", "fork": {"n": 1}, "generate": {}}, "fork"),
        ("", {"text": "a", "generate": {"max_tokens": 3}}, "max_tokens"),
        ("", {"text": "a", "generate": {"sampling_params": {"top_p": 7}, "stream": True}}, "top_p"),
        ("", {"text": "a", "select": {"choices": ["a"], "method": "best"}}, "method"),
        ("", {"generate": {}}, "text"),
        ("/append", {}, "text"),
        ("/append", {"text": 3}, "text"),
        ("/generate", {"sampling_params": {"max_new_tokens": 3}}, "max_new_tokens"),
        ("/generate", {"sampling_params": {"top_p": 7}}, "top_p"),
        ("/generate", {"max_tokens": 3}, "max_tokens"),
        ("/select", {"choices": []}, "choices"),
        ("/select", {}, "choices"),
        ("/select", {"choices": ["a"], "method": "best"}, "method"),
        ("/select", {"choices": ["a"], "temperature": -1}, "temperature"),
        ("/fork", {"n": 0}, "n"),
        ("/fork", {"n": True}, "n"),
    ],
)
def test_refusals_name_the_parameter_and_make_nothing(run: Run, what: str, body: dict[str, Any], param: str) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        path = await made(client, "a") + what if what else PROGRAMS
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert param in answer.json()["error"]["param"]
        assert engine.core.seen == []
        assert (await client.get(PROGRAMS)).json()["states"] == bool(what)

    run(test)


def test_a_state_without_text_cannot_go_on(run: Run) -> None:
    async def test(client: Client, *_: Any) -> None:
        path = await made(client)
        for what, body in (("generate", {}), ("generate", {"stream": True}), ("select", {"choices": ["a"]})):
            answer = await client.post(f"{path}/{what}", json=body)
            assert answer.status_code == 400
            assert "append some" in answer.json()["error"]["message"]

    run(test)


def test_about_the_model(run: Run) -> None:
    async def test(client: Client, engine: Any, _: Any) -> None:
        about = (await client.get(PROGRAMS)).json()
        assert about["special_tokens"]["<|im_end|>"] == 3
        assert about["named_tokens"] == {"eos_token": "</s>"}
        assert about["eos_token_ids"] == [1]
        assert "im_start" in about["chat_template"]
        assert (about["model"], about["states"]) == ("echo", 0)

    run(test)


def test_a_model_process_that_went_down_keeps_the_states(run: Run) -> None:
    """Texts are the HTTP process's: after a restart a program goes on, its prefix is computed anew."""

    async def test(client: Client, engine: Any, _: Any) -> None:
        path = await made(client, "ab")
        going = asyncio.create_task(client.post(f"{path}/generate", json=greedy(100)))
        await asyncio.sleep(0.1)
        send = engine.service._send
        engine.service.disconnect("the model process ended: it is being restarted")
        answer = await going
        assert answer.status_code == 503
        assert "restarted" in answer.json()["error"]["message"]
        assert (await client.post(f"{path}/generate", json=greedy(1))).status_code == 503
        assert (await client.delete(await made(client, "x"))).status_code == 200
        engine.service.connect(send)
        assert (await done(client, f"{path}/generate", **greedy(2)))["text"] == "ab"

    run(test, step_s=0.01)


# --- on a real engine


def real(folder: Path, **sections: Any) -> AbstractAsyncContextManager[tuple[Client, Engine]]:
    """A client of the program API on an engine of this process."""
    api = ProgramApi(ProgramApi.Options(), PluginContext("api", "program"))
    return on_engine(folder, [api], **{"cache": {"tokens": 4096}} | sections)


TEXT = "When in the course of events it becomes necessary to test a thing"


def test_real_forks_compute_every_prefix_once_and_are_held(tiny_model: Callable[[str], Path]) -> None:
    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            root = await made(client, TEXT)
            ids = (await done(client, f"{root}/fork", n=4))["ids"]
            branches = [f"{PROGRAMS}/{branch}" for branch in ids]
            for i, branch in enumerate(branches):
                await done(client, f"{branch}/append", text=f" {i} thing")
            encoded = [engine.tokenizer.encode(f"{TEXT} {i} thing") for i in range(4)]
            least = len({tuple(p[:i]) for p in encoded for i in range(1, len(p))}) + 4
            answers = await asyncio.gather(*(done(client, f"{b}/generate", **greedy(6)) for b in branches))
            assert engine.stats()["prefill_tokens"] == least
            for prompt, answer in zip(encoded, answers, strict=True):
                params = SamplingParams(temperature=0, max_tokens=6)
                assert answer["token_ids"] == engine.generate(prompt, params, salt="x").token_ids
            assert engine.stats()["holds"]["count"] == 4
            before = engine.stats()["prefill_tokens"]
            second = await done(client, f"{branches[0]}/generate", **greedy(4, ignore_eos=True))
            assert second["usage"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
            assert engine.stats()["prefill_tokens"] == before + 1
            for path in (root, *branches):
                await client.delete(path)
            assert engine.stats()["holds"] == {"count": 0, "tokens": 0, "revoked": 0, "expired": 0}
            engine.flush_cache()
            assert engine.stats()["groups"][0]["free"] == 4096

    asyncio.run(test())


@pytest.mark.parametrize("method", METHODS)
def test_real_select_chooses_by_what_the_engine_scores(tiny_model: Callable[[str], Path], method: str) -> None:
    choices = ["es sugar", "e", " sugar", "größer", "e it", ""]

    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            path = await made(client, "The phloem of a tree carri")
            answer = await done(client, f"{path}/select", choices=choices, method=method)
            joint = join(engine.tokenizer, [], "The phloem of a tree carri", choices)
            scores = engine.score(joint.prompt, joint.continuations)
            for mine, theirs in zip(answer["token_logprobs"], scores, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
            if method != METHODS[2]:
                assert answer["index"] == choose(method, scores).index
                assert answer["scores"] == pytest.approx(choose(method, scores).scores, abs=1e-4)
            state = await shown(client, path)
            assert state["token_ids"] == joint.prompt + joint.continuations[answer["index"]]

    asyncio.run(test())


def test_real_one_pass_for_sixty_four_choices(tiny_model: Callable[[str], Path]) -> None:
    async def test() -> None:
        async with real(tiny_model("llama")) as (client, engine):
            path = await made(client, TEXT)
            await done(client, f"{path}/select", choices=[f" {i} leaves" for i in range(64)])
            stats = engine.stats()
            assert stats["steps"] == 1
            assert stats["prefill_tokens"] == len(engine.tokenizer.encode(TEXT))

    asyncio.run(test())
