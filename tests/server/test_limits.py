"""Authentication, CORS, body, queue and time limits, disconnects, drain, and errors of the framework itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from test_openai_api import USER, refused

from phloem.errors import EngineDeadError
from phloem.server.app import create_app

Run = Callable[..., Any]
LONG = {"prompt": "a", "max_tokens": 200}


def test_api_key(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sesame"},
            {"x-api-key": "sesame"},
        ):
            for path in ("/v1/models", "/metrics", "/config", "/nope", "/openapi.json"):
                response = await client.get(path, headers=headers)
                refused(response, None, "API key is missing or wrong", status=401)
                assert response.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer sesame"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200

    run(test, api_key="sesame")


def test_cors(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert (await client.options("/v1/completions", headers=ask)).status_code == 200
        reply = await client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.get("/v1/models", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers

    run(test, cors=("https://a.example",), api_key="sesame")


def test_body_limit_declared_and_streamed(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        json_type = {"content-type": "application/json"}
        for content in (b" " * 2000, chunks()):
            reply = await client.post("/v1/completions", content=content, headers=json_type)
            refused(reply, None, "exceeds 1000 bytes", status=413)
        assert (await client.post("/v1/completions", json={"prompt": "a" * 900, "max_tokens": 1})).status_code == 400

    run(test, max_body=1000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "name", "size"),
    [
        ({"json_schema": {"enum": ["a" * 1000]}}, "json_schema", 1013),
        ({"guided_json": {"enum": ["\u00e4" * 500, None]}}, "guided_json", 1020),
        ({"regex": "\u00e4" * 501}, "regex", 1002),
        ({"choices": ["a" * 1000]}, "choices", 1004),
    ],
)
def test_a_large_constraint_never_reaches_the_engine(
    run: Run, given: dict[str, Any], name: str, size: int, stream: bool
) -> None:
    """A schema of megabytes held up every other request where it was read, before its size was looked at."""

    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "a", "stream": stream} | given)
        refused(reply, name, f"{name} of {size} bytes exceeds the limit of 1000")
        assert "grammar.max_source" in reply.json()["error"]["message"]
        assert (engine.core.seen, gate.open) == ([], 0)
        small = {"prompt": "a", "json_schema": {"enum": ["a" * 900]}, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=small)).status_code == 200
        assert engine.core.seen[0].params.json_schema == json.dumps(small["json_schema"], separators=(",", ":"))

    run(test, max_source=1000, grammar=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature must be a finite number"),
        (b'{"prompt": "a", "top_p": Infinity}', "top_p must be a finite number"),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature must be a finite number"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt": "a", "cache_salt": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt": "a", "json_schema": {"x": "\\ud800"}}', "half of a surrogate pair"),
        (b'{"prompt": "a", "json_schema": {"x": NaN}}', "json_schema is not JSON: Out of range float values"),
        (b'{"prompt": "a", "json_schema": {"x": 1e400, "y": null}}', "json_schema is not JSON: Out of range float"),
        (
            b'{"prompt": "a", "logits_processors": {"a": {"b": 1' + b"0" * 30 + b"}}}",
            "cannot be passed on",
        ),
        (b'{"prompt": "a", "\\ud800": 1}', "unknown parameter"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
    ids=range(17),
)
def test_malformed_bodies(run: Run, content: bytes, words: str) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        reply = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200

    run(test, max_body=1_000_000)


def test_wrong_content_type_is_explained(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        reply = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
        refused(reply, None, "Content-Type: application/json")

    run(test)


def test_unknown_routes_and_methods(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        refused(
            await client.post("/v1/chat/completion", json={}), None, "/v1/chat/completion does not exist", status=404
        )
        reply = await client.get("/v1/completions")
        refused(reply, None, "use POST", status=405)
        assert reply.headers["allow"] == "POST"

    run(test)


def test_a_bug_is_a_500_in_the_same_shape(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        engine.service.submit = lambda call: 1 / 0
        refused(await client.post("/v1/completions", json=LONG), None, "internal error", status=500)
        assert gate.open == 0

    run(test)


def test_queue_limit(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        running = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(3)]
        while gate.open < 3:
            await asyncio.sleep(0.01)
        for stream in (False, True):
            reply = await client.post("/v1/completions", json=LONG | {"stream": stream})
            refused(reply, None, "the limit is 3", status=429)
            assert int(reply.headers["retry-after"]) >= 1
        assert [reply.status_code for reply in await asyncio.gather(*running)] == [200] * 3
        assert (await client.post("/v1/completions", json=LONG)).status_code == 200

    run(test, limit=3, step_s=0.002)


def test_the_engines_own_queue_limit_is_a_429_too(run: Run) -> None:
    async def test(client: httpx.AsyncClient, *_: Any) -> None:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=LONG) for _ in range(5)))
        refusals = [reply for reply in replies if reply.status_code != 200]
        assert len(refusals) == 3
        for reply in refusals:
            refused(reply, None, "are waiting", status=429)
            assert "retry-after" in reply.headers

    run(test, most_calls=2, step_s=0.002)


def test_request_timeout(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        refused(await client.post("/v1/completions", json=LONG), None, "longer than 0.2 s", status=504)
        stream = await client.post("/v1/completions", json=LONG | {"stream": True})
        last = json.loads(stream.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["type"] == "timeout"
        assert await engine.settled()
        assert gate.open == 0

    run(test, timeout_s=0.2, step_s=0.01)


async def drop(app: Any, path: str, body: dict[str, Any], *, after: int) -> list[Any]:
    """Speak ASGI as a server would and hang up once `after` messages have been sent, or 0.1 s later."""
    raw = json.dumps(body).encode()
    sent: list[Any] = []
    enough = asyncio.Event()
    asked = 0

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            return {"type": "http.request", "body": raw, "more_body": False}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(enough.wait(), 0.1 if after == 0 else 5)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if 0 < after <= len(sent):
            enough.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 200}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/generate", {"text": ["a", "b"]}),
    ],
)
def test_a_client_that_leaves_cancels_its_request(run: Run, path: str, body: dict[str, Any], stream: bool) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        app = client._transport.app  # type: ignore[attr-defined]
        sent = await drop(app, path, body | {"stream": stream}, after=3 if stream else 0)
        assert gate.open == 0
        assert await engine.settled(), "the engine still works for a client that has gone"
        assert engine.core.stats()["groups"][0]["leased"] == 0
        assert sent[0]["status"] == (200 if stream else 499)
        assert engine.core.progress[0] < 200, "the call was not cancelled, it ran to its end"

    run(test, step_s=0.005)


def test_drain_refuses_new_calls_and_lets_running_ones_finish(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        running = asyncio.create_task(client.post("/v1/completions", json=LONG))
        while not gate.open:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(gate.drain(10))
        await asyncio.sleep(0.01)
        refused(await client.post("/v1/completions", json=LONG), None, "shutting down", status=503)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["draining"]) == (503, True)
        assert (await client.get("/health")).status_code == 200
        assert await draining
        assert (await running).json()["usage"]["completion_tokens"] == 200

    run(test, step_s=0.002)


def test_a_drain_that_takes_too_long_ends_calls_with_an_error(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        running = asyncio.create_task(client.post("/v1/completions", json=LONG))
        while not gate.open:
            await asyncio.sleep(0.01)
        assert not await gate.drain(0.05)
        engine.service.fail_all(EngineDeadError("could not wait"))
        refused(await running, None, "could not wait", status=503)
        assert await engine.settled()

    run(test, step_s=0.05)


def test_abort_takes_exactly_the_named_call(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        body = {"text": "a", "sampling_params": {"max_tokens": 100}}
        first, second = (asyncio.create_task(client.post("/generate", json=body | {"rid": rid})) for rid in ("a", "ab"))
        while gate.open < 2:
            await asyncio.sleep(0.01)
        duplicate = await client.post("/generate", json=body | {"rid": "a"})
        refused(duplicate, "rid", "'a' is in use")
        assert (await client.post("/abort", json={"rid": "abc"})).json() == {"aborted": False}
        assert (await client.post("/abort", json={"rid": "a"})).json() == {"aborted": True}
        assert (await first).json()["meta_info"]["finish_reason"] == "abort"
        other = (await second).json()["meta_info"]
        assert (other["finish_reason"], other["completion_tokens"]) == ("length", 100)

    run(test, step_s=0.005)


def test_everything_in_flight_fails_when_the_process_dies(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        plain = asyncio.create_task(client.post("/v1/completions", json=LONG))
        streamed = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": True}))
        flush = None
        while gate.open < 2 or not engine.core.progress[0]:
            await asyncio.sleep(0.01)
        flush = asyncio.create_task(client.post("/flush_cache"))
        await asyncio.sleep(0)
        engine.service.disconnect("the model process died; it is being restarted")
        refused(await plain, None, "died", "retry", status=503)
        assert (await plain).headers["retry-after"]
        last = json.loads((await streamed).text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "died" in last["error"]["message"]
        assert last["error"]["type"] == "service_unavailable"
        assert (await flush).status_code in (200, 503)
        refused(await client.post("/v1/completions", json=LONG), None, "restarted", status=503)
        assert gate.open == 0

    run(test, step_s=0.02)


def test_before_the_model_is_loaded_routes_answer_503() -> None:
    from phloem.interfaces import PluginContext
    from phloem.plugins.api.openai import OpenAIApi
    from phloem.server.gate import Gate
    from phloem.server.remote import RemoteService
    from phloem.server.supervisor import Supervisor

    async def test() -> None:
        service = RemoteService()
        gate = Gate(service, limit=1, timeout_s=1, max_source=2**20)
        api = OpenAIApi(OpenAIApi.Options(), PluginContext("api", "openai"))
        app = create_app(gate, Supervisor(service, {}), [api], config={}, max_body=1000)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for reply in (
                await client.post("/v1/completions", json={"prompt": "a"}),
                await client.get("/v1/models"),
                await client.post("/flush_cache"),
            ):
                refused(reply, None, "still loading", status=503)
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            assert (await client.get("/ready")).status_code == 503
            assert "phloem_model_restarts_total 0" in (await client.get("/metrics")).text

    asyncio.run(test())
