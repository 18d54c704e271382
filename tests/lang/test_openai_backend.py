"""Programs on OpenAI-compatible servers: phloem's own API speaks all of it, scripted servers lack what others lack."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from live import Live, free_port

import phloem.lang as pl
from phloem import SamplingParams
from phloem.choosing import METHODS
from phloem.errors import ConfigError, EngineDeadError, PhloemError, PluginError, RequestError
from phloem.lang.backends.openai import OpenAIBackend

GREEDY = SamplingParams(max_tokens=6, temperature=0)


def backend(server: Live, **options: Any) -> OpenAIBackend:
    """A backend for the live server."""
    name = server.http.get("/v1/models").json()["data"][0]["id"]
    return OpenAIBackend(name, f"{server.url}/v1", **options)


def completions(server: Live, **options: Any) -> OpenAIBackend:
    return backend(server, is_chat_model=False, **options)


@pl.function
def story(s: pl.State, start: str) -> None:
    s += start
    forks = s.fork(2)
    forks += [" one" + pl.gen("end"), " two" + pl.gen("end")]
    forks.join()
    s += " three" + pl.gen("last", stop="e")


@pl.function
def talk(s: pl.State, question: str) -> None:
    s += pl.system("Be brief.")
    s += pl.user(question)
    s += pl.assistant(pl.gen("first"))
    s += pl.user("And?")
    s += pl.assistant(pl.gen("second"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_not_unicode_is_refused(lang_server: Live, chat: bool, stream: bool) -> None:
    able = backend(lang_server, is_chat_model=chat)
    state = (talk if chat else story).run("Is \ud800 good?", backend=able, stream=stream)
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D800\)"):
        _ = state["first" if chat else "last"] and list(state.text_iter())


def test_a_completions_program_writes_what_the_api_does(lang_server: Live) -> None:
    state = story.run("The fox", backend=completions(lang_server), max_new_tokens=5, temperature=0)

    def direct(prompt: str, **more: Any) -> str:
        answer = lang_server.complete(prompt, max_tokens=5, temperature=0, **more).json()
        return str(answer["choices"][0]["text"])

    assert state["end"] == [direct("The fox one"), direct("The fox two")]
    assert state["last"] == direct("The fox three", stop="e")
    assert state.text() == "The fox three" + state["last"]
    meta = state.get_meta_info("last")
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert 0 <= meta["cached_tokens"] < meta["prompt_tokens"]
    assert 0 < meta["completion_tokens"] <= 5


def test_a_chat_program_sends_its_messages(lang_server: Live) -> None:
    state = talk.run("Why?", backend=backend(lang_server), max_new_tokens=5, temperature=0)
    messages = state.messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    for place in (2, 4):
        chat = lang_server.openai.chat.completions.create(
            model=lang_server.openai.models.list().data[0].id, messages=messages[:place], max_tokens=5, temperature=0
        )
        assert messages[place]["content"] == chat.choices[0].message.content
    assert state["second"] == messages[4]["content"]


@pytest.mark.parametrize("chat", [False, True])
def test_streaming_n_and_logprobs(lang_server: Live, chat: bool) -> None:
    used = backend(lang_server, is_chat_model=chat)

    async def main() -> None:
        path = used.start()
        _open(path, chat)
        twin, third = path.fork(2)
        deltas: list[str] = []
        streamed = await path.generate(GREEDY, deltas.append)
        whole = await twin.generate(GREEDY)
        assert len(deltas) > 1
        assert "".join(deltas) == streamed.texts[0] == whole.texts[0]
        assert streamed.meta[0]["completion_tokens"] == 6
        params = SamplingParams(max_tokens=3, seed=1, n=2, logprobs=2)
        for on_text in (None, deltas.append):
            deltas.clear()
            made = await third.fork(1)[0].generate(params, on_text)
            assert len(made.texts) == len(made.meta) == 2
            assert made.logprobs is not None
            assert [len(items) for items in made.logprobs] == [3, 3]
            assert all(item.logprob <= 0 and len(item.top) >= 2 for items in made.logprobs for item in items)
            assert "".join(made.meta[0]["tokens"]).startswith(made.texts[0][:1])
            assert on_text is None or "".join(deltas) == made.texts[0]

    asyncio.run(main())


def _open(path: Any, chat: bool) -> None:
    if chat:
        path.begin("user")
    path.append("The quick brown fox")
    if chat:
        path.end("user")
        path.begin("assistant")


CHOICES = [" yes", " yes indeed", " no", " größer", " y"]


@pytest.mark.parametrize("method", METHODS)
def test_choices_are_scored_by_echo(lang_server: Live, method: str) -> None:
    """As the prompt's own log-probabilities say, each choice tokenised together with what is before it."""

    async def main() -> None:
        path = completions(lang_server).start()
        path.append("The fox says")
        found = await path.select(CHOICES, method)
        for choice, row in zip(CHOICES, found.token_logprobs, strict=True):
            answer = lang_server.complete("The fox says" + choice, max_tokens=1, prompt_logprobs=0).json()
            direct = [item["logprob"] for item in answer["choices"][0]["prompt_logprobs"][-len(row) :]]
            assert row == pytest.approx(direct, abs=1e-4)
        means = [sum(row) / len(row) for row in found.token_logprobs]
        if method == METHODS[0]:
            assert found.index == means.index(max(means))
            assert found.scores == pytest.approx(means)
        made = await path.generate(GREEDY)
        other = completions(lang_server).start()
        other.append("The fox says" + found.choice)
        assert made.texts == (await other.generate(GREEDY)).texts
        if method != METHODS[0]:
            return
        drawn = {(await path.fork(1)[0].select([" a", " b"], METHODS[0], 50.0)).choice for _ in range(24)}
        assert drawn == {" a", " b"}

    asyncio.run(main())


def test_constraints_by_dialect(lang_server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}

    async def text(chat: bool, dialect: str, **params: Any) -> str:
        path = backend(lang_server, is_chat_model=chat, dialect=dialect).start()
        _open(path, chat)
        return (await path.generate(SamplingParams(max_tokens=24, seed=3, **params))).texts[0]

    async def main() -> None:
        for chat, dialect in ((False, "phloem"), (True, "vllm")):
            assert (await text(chat, dialect, regex="[ab]{3}c")).endswith("c")
            assert set(json.loads(await text(chat, dialect, json_schema=schema))) == {"a"}
        assert await text(False, "vllm", choices=["left", "right"]) in ("left", "right")
        assert set(json.loads(await text(True, "openai", json_schema=json.dumps(schema), strict=False))) == {"a"}
        chosen = backend(lang_server, dialect="phloem").start()
        _open(chosen, True)
        found = await chosen.select(["left", "right"], METHODS[1])
        assert found.choice in ("left", "right")
        assert found.meta["method"] == "greedy_matching"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("chat", "dialect", "params", "words"),
    [
        (False, "openai", {"regex": "a"}, "regex cannot be honoured by OpenAI's completions API"),
        (True, "openai", {"regex": "a"}, "regex cannot be honoured by OpenAI's chat API"),
        (False, "openai", {"json_schema": {}}, "json_schema cannot be honoured"),
        (True, "openai", {"json_schema": True}, "json_schema must be an object"),
        (True, "openai", {"top_k": 3}, "top_k cannot be honoured"),
        (True, "vllm", {"lark": "start: /a/"}, "lark cannot be honoured"),
        (False, "sglang", {"structural_tag": {}}, "structural_tag cannot be honoured"),
        (True, "openai", {"strict": False}, "strict cannot be honoured"),
        (False, "phloem", {"max_tokens": None}, "max_tokens is missing"),
    ],
)
def test_parameters_that_a_server_lacks_are_refused_by_name(
    chat: bool, dialect: str, params: dict[str, Any], words: str
) -> None:
    path = OpenAIBackend("m", f"http://127.0.0.1:{free_port()}/v1", is_chat_model=chat, dialect=dialect).start()
    _open(path, chat)
    with pytest.raises(RequestError, match=words) as caught:
        asyncio.run(path.generate(SamplingParams(**{"max_tokens": 4, **params})))
    assert caught.value.param in params
    if words == "regex cannot be honoured by OpenAI's chat API":
        assert "phloem, vllm, sglang" in str(caught.value)


def test_what_a_chat_api_cannot_do_is_refused() -> None:
    used = OpenAIBackend("m", f"http://127.0.0.1:{free_port()}/v1")

    def error(write: Any) -> str:
        @pl.function
        def program(s: pl.State) -> None:
            s += write

        found = program.run(backend=used).error()
        assert isinstance(found, RequestError)
        return str(found)

    question = pl.user("a")
    assert "takes messages" in error("text" + pl.gen("x"))
    assert "outside of a message" in error(question + pl.gen("x"))
    assert "role user" in error(pl.user("a" + pl.gen("x")))
    assert "after 'So: ' in the same message" in error(question + pl.assistant("So: " + pl.gen("x")))
    assert "scores no given text" in error(question + pl.assistant(pl.select("x", ["a", "b"])))
    assert "begin with system" in error(pl.assistant(pl.gen("x")))
    assert "vision" in error(pl.user(pl.image("a.png")))
    assert "select" not in used.capabilities
    for bad in ({"priority": 1}, {"salt": "a"}):
        with pytest.raises(RequestError, match=f"{next(iter(bad))} cannot be honoured"):
            used.start(**bad)
    with pytest.raises(RequestError, match="cannot be flushed"):
        pl.flush_cache(used)


def test_salt_and_priority_reach_servers_that_know_them(lang_server: Live) -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "Salted text of some length, said twice." + pl.gen("x", max_tokens=2)

    used = completions(lang_server, dialect="phloem")
    cached = [program.run(backend=used, salt=salt).get_meta_info("x")["cached_tokens"] for salt in ("a", "a", "b")]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert "schedule policy 'lpm' ignores it" in str(program.run(backend=used, priority=2).error())


def test_failures_say_which_server_and_what_to_do(lang_server: Live) -> None:
    async def attempt(used: OpenAIBackend, **params: Any) -> PhloemError:
        path = used.start()
        _open(path, used.chat)
        with pytest.raises(PhloemError) as caught:
            await path.generate(SamplingParams(**{"max_tokens": 4, **params}))
        return caught.value

    async def main() -> None:
        url = f"{lang_server.url}/v1"
        wrong = await attempt(OpenAIBackend("nonesuch", url))
        assert isinstance(wrong, RequestError)
        assert wrong.status == 404
        assert f"{url}: the model 'nonesuch' does not exist" in str(wrong)
        long = await attempt(completions(lang_server), max_tokens=100_000)
        assert long.kind == "context_length_exceeded"
        gone = await attempt(OpenAIBackend("m", f"http://127.0.0.1:{free_port()}/v1", max_retries=0))
        assert isinstance(gone, EngineDeadError)
        assert "does not answer" in str(gone)

    asyncio.run(main())


def test_the_package_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key"):
        pl.OpenAI("gpt-4o-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    elsewhere = OpenAIBackend("m", "http://127.0.0.1:1/v1")
    assert elsewhere._clients._make().api_key == "none"  # a key for OpenAI is not sent to others
    assert not pl.OpenAI("davinci-002").chat
    assert pl.OpenAI("gpt-4o-mini").chat
    with pytest.raises(ConfigError, match=r"dialect 'vlm' is unknown \(did you mean 'vllm'"):
        pl.OpenAI("m", dialect="vlm")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(PluginError, match=r"pip install 'phloem\[lang\]'"):
        pl.OpenAI("m", "http://127.0.0.1:1/v1")


@contextmanager
def scripted(answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers in order and keeps what it was asked. Bytes are sent as an event stream."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = answers[len(asked) - 1]
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if isinstance(body, bytes) else "application/json")
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _written(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}]}


NO_ECHO = [(400, {"error": {"message": "echo is not supported"}}), _written("x")]


@pytest.mark.parametrize("refusal", NO_ECHO)
@pytest.mark.parametrize(
    ("text", "chosen"),
    [(" no way", " no"), ("yes indeed, sir", " yes indeed"), (" yes.", " yes"), (" yes indeed", " yes indeed")],
)
def test_without_echo_choices_are_matched_greedily(refusal: tuple[int, Any], text: str, chosen: str) -> None:
    with scripted([refusal, _written(text), _written(text)]) as (url, asked):
        path = OpenAIBackend("m", url, is_chat_model=False).start()
        path.append("Is it?")
        found = asyncio.run(path.fork(1)[0].select([" yes indeed", " yes", " no"], METHODS[0]))
        assert found.choice == chosen
        assert found.meta["method"] == "greedy_matching"
        assert asyncio.run(path.select([" yes indeed", " yes", " no"], METHODS[0])).choice == chosen
    assert [one.get("echo") for one in asked] == [True, None, None]  # it is asked for echoes once
    assert asked[1]["max_tokens"] == len(" yes indeed")


def test_greedy_matching_invents_no_choice() -> None:
    with scripted([NO_ECHO[0], _written("maybe")]) as (url, _):
        path = OpenAIBackend("m", url, is_chat_model=False).start()
        path.append("Is it?")
        with pytest.raises(RequestError, match="'maybe', with which none of the choices begins"):
            asyncio.run(path.select([" yes", " no"], METHODS[0]))


def test_a_stream_that_breaks_off_is_an_error() -> None:
    chunk = {"choices": [{"index": 0, "text": "abc", "finish_reason": None}]}
    whole = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    failed = b'data: {"error": {"message": "out of luck", "type": "engine_error"}}\n\n'
    for body, words in ((whole, "broke off"), (whole + failed, "out of luck")):
        with scripted([(200, body)]) as (url, _):
            path = OpenAIBackend("m", url, is_chat_model=False).start()
            path.append("x")
            deltas: list[str] = []
            with pytest.raises(PhloemError, match=words):
                asyncio.run(path.generate(GREEDY, deltas.append))
            assert deltas == ["abc"]


def test_an_answer_without_choices_is_an_error() -> None:
    with scripted([(200, {"choices": []})]) as (url, _):
        path = OpenAIBackend("m", url, is_chat_model=False).start()
        path.append("x")
        with pytest.raises(PhloemError, match="without any choice"):
            asyncio.run(path.generate(GREEDY))


def test_newer_names_go_to_openai_only() -> None:
    body = pl.OpenAI("gpt-4o-mini", api_key="k").writer.body(SamplingParams(max_tokens=4, logprobs=1))
    assert body == {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 1}
    other = pl.OpenAI("m", "http://127.0.0.1:1/v1", dialect="sglang").writer
    assert other.body(SamplingParams(max_tokens=4, json_schema={"a": 1}, include_stop=True)) == {
        "max_tokens": 4,
        "json_schema": '{"a": 1}',
        "no_stop_trim": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
