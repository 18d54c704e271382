"""Programs on a phloem server: the same texts as in this process, nothing computed twice, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from live import Live, free_port

import phloem.lang as pl
from phloem import SamplingParams
from phloem.choosing import METHODS
from phloem.errors import AbortedError, ConfigError, EngineDeadError, PluginError, RequestError
from phloem.lang.backends._endings import GATHER_S, MOST, Endings
from phloem.lang.backends.http import HttpBackend
from phloem.lang.backends.local import LocalBackend
from phloem.lang.backends.runtime import Runtime

GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def remote(lang_server: Live) -> Iterator[HttpBackend]:
    """A backend on the live server, which must know no state in the end."""
    with HttpBackend(lang_server.url) as backend:
        yield backend
    lang_server.until(lambda: states(lang_server) == 0)


@pytest.fixture(scope="module")
def local(lang_model: Path) -> Iterator[LocalBackend]:
    """The same model in this process."""
    with LocalBackend.make(str(lang_model), cache={"tokens": 4096}, engine={"threads": 1}) as backend:
        yield backend


def states(server: Live) -> int:
    """How many program states the server holds."""
    found: int = server.http.get("/v1/programs").json()["states"]
    return found


@pl.function
def debate(s: pl.State, topic: str) -> None:
    s += pl.system("Be brief.")
    s += pl.user(f"Is {topic} good?")
    with s.assistant():
        sides = s.fork(3)
        for i, side in enumerate(sides):
            side += f"Side {i}:" + pl.gen("claim", max_tokens=6)
            inner = side.fork(2)
            inner += [" pro" + pl.gen("a"), " con" + pl.gen("a")]
            inner.join("concate_and_append")
        sides.join()
        s += " / ".join(s["claim"])
    s += pl.user("Choose.")
    s += pl.assistant("I say" + pl.select("side", choices=[" yes", " no", " yes and no", " größer"]))
    s += pl.user("Once more.") + pl.assistant(pl.gen("end", n=2, stop="e"))


def everything(state: pl.State) -> dict[str, Any]:
    assert state.error() is None
    return {name: state[name] for name in ("claim", "side", "end")} | {"": state.text()}


def test_a_program_writes_what_it_writes_in_process(remote: HttpBackend, local: LocalBackend) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0}
    for topic in ("bread", "größer, 你好"):
        there = debate.run(topic, backend=remote, **options)
        here = debate.run(topic, backend=local, **options)
        assert everything(there) == everything(here)
        assert there.messages() == here.messages()
        reports = [state.get_meta_info("side")["scores"] for state in (there, here)]
        assert reports[0] == pytest.approx(reports[1], abs=1e-3)


def prefixes(server: Live, text: str, length: int | None = None) -> set[tuple[int, ...]]:
    """The beginnings of a text, in tokens."""
    tokens = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"][:length]
    return {tuple(tokens[:n]) for n in range(1, len(tokens) + 1)}


def flushed(server: Live) -> dict[str, float]:
    """The metrics of a server with an empty cache."""
    server.http.post("/flush_cache")
    server.until(lambda: server.metrics()["phloem_kv_slots/0/evictable"] == 0)
    return server.metrics()


def test_the_same_guarantees_about_sharing(remote: HttpBackend, lang_server: Live) -> None:
    """What branches and a select share is run once, though all begin together: every distinct token once."""
    shared = "A prefix that all of the branches share, not in any other test. " * 2

    @pl.function
    def program(s: pl.State) -> None:
        s += shared
        forks = s.fork(6)
        forks += lambda i: f"{i}:" + pl.gen("x", max_tokens=2)
        forks.join()
        s += pl.select("y", choices=[" a long choice", " a longer choice", " no"])

    before = flushed(lang_server)
    state = program.run(backend=remote, temperature=0)
    selected = state.get_meta_info("y")["prompt_tokens"]
    branches = [prefixes(lang_server, f"{shared}{i}:") for i in range(6)]
    distinct = set.union(*branches, prefixes(lang_server, shared, selected))
    assert len(distinct) < sum(meta["prompt_tokens"] for meta in state.get_meta_info("x")) / 4

    def ran(name: str) -> float:
        return lang_server.metrics()[f"phloem_{name}_tokens_total"] - before[f"phloem_{name}_tokens_total"]

    lang_server.until(lambda: ran("prefill") == len(distinct) and ran("scored") > 0, 10)


def test_items_of_a_batch_are_siblings(remote: HttpBackend, lang_server: Live) -> None:
    """What they begin with is run once, to the last token."""

    @pl.function
    def program(s: pl.State, i: int) -> None:
        s += f"The items of one batch begin with this: {i}," + pl.gen("x", max_tokens=2)

    before = flushed(lang_server)["phloem_prefill_tokens_total"]
    done = program.run_batch([{"i": i} for i in range(8)], backend=remote, temperature=0)
    assert all(state.error() is None for state in done)
    texts = [f"The items of one batch begin with this: {i}," for i in range(8)]
    distinct = set.union(*(prefixes(lang_server, text) for text in texts))
    lang_server.until(lambda: lang_server.metrics()["phloem_prefill_tokens_total"] - before == len(distinct), 10)


def test_streaming(remote: HttpBackend) -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += pl.user("Count.")
        s += pl.assistant(pl.gen("a", max_tokens=8) + "|" + pl.gen("b", max_tokens=8, n=2, logprobs=1))

    streamed = program.run(stream=True, backend=remote, temperature=0)
    pieces = list(streamed.text_iter("a"))  # as many as the reader was quick to take
    whole = program.run(backend=remote, temperature=0)
    assert "".join(pieces) == streamed["a"] == whole["a"]
    assert streamed["b"] == whole["b"]
    assert "".join(streamed.text_iter()) == whole.text()
    for state in (streamed, whole):
        for meta in state.get_meta_info("b"):
            assert meta["finish_reason"]["type"] in ("stop", "length")
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] <= 8

    async def main() -> None:
        path = remote.start()
        path.append("Count: one, two,")
        deltas: list[str] = []
        made = await path.generate(SamplingParams(max_tokens=12, temperature=0), deltas.append)
        assert "".join(deltas) == made.texts[0]
        assert len(deltas) > 1
        await path.close()

    asyncio.run(main())


@pytest.mark.parametrize("method", METHODS)
def test_selections(remote: HttpBackend, local: LocalBackend, method: str) -> None:
    """Choices that share prefixes, are prefixes of each other, and are not ASCII, after text they merge with."""
    choices = ["sugar", "sug", " sugar", "größer", "sugar cane", "s"]

    async def main() -> None:
        found = []
        for backend in (remote, local):
            path = backend.start()
            path.append("The phloem of a tree carries ")
            selection = await path.select(choices, method)
            found.append((selection, (await path.generate(GREEDY)).texts))
            await path.close()
        (there, after), (here, also) = found
        assert there.index == here.index
        assert there.choice == choices[there.index]
        assert there.scores == pytest.approx(here.scores, abs=1e-3)
        assert [len(row) for row in there.token_logprobs] == [len(row) for row in here.token_logprobs]
        assert after == also

    asyncio.run(main())


def test_forks_before_and_after_anything(remote: HttpBackend) -> None:
    """A branch begins with what its parent had then; who closes first does not matter."""

    async def main() -> None:
        root = remote.start()
        early, never = root.fork(2)
        root.append("One two")
        late, unused = root.fork(2)
        root.append(" three")
        early.begin("user")
        early.append("Hi")
        early.end("user")
        await never.close()
        await root.close()
        await root.close()
        late.append(" four")
        twin = late.fork(1)[0]
        await unused.close()
        results = [await path.generate(GREEDY) for path in (early, late, twin)]
        expected = []
        for text in ("<|im_start|>user\nHi<|im_end|>\n", "One two four"):
            path = remote.start()
            path.append(text)
            expected.append((await path.generate(GREEDY)).texts)
            await path.close()
        assert [made.texts for made in results] == [expected[0], expected[1], expected[1]]
        for path in (early, late, twin):
            await path.close()

    asyncio.run(main())


def test_commit_computes_what_was_appended(remote: HttpBackend) -> None:
    async def main() -> None:
        path = remote.start()
        path.append("Committed ahead of its use, this text is. " * 2)
        await path.commit()
        meta = (await path.generate(GREEDY)).meta[0]
        assert meta["cached_tokens"] >= meta["prompt_tokens"] - 1
        await path.close()

    asyncio.run(main())


def test_a_cancelled_branch_frees_the_server_and_leaves_the_others(remote: HttpBackend, lang_server: Live) -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "Go on:"
        slow, quick = s.fork(2)
        slow += pl.gen("x", max_tokens=200, ignore_eos=True)
        quick += pl.gen("x", max_tokens=3)
        assert isinstance(quick["x"], str)
        slow.cancel()
        quick += pl.gen("y", max_tokens=3)
        s.set_var("both", [slow.error(), quick["y"]])

    state = program.run(backend=remote, temperature=0)
    assert isinstance(state["both"][0], AbortedError)
    assert isinstance(state["both"][1], str)
    lang_server.until(lambda: lang_server.metrics()["phloem_requests_running"] == 0)


def test_a_body_that_raises_at_once_leaves_no_state(remote: HttpBackend, lang_server: Live) -> None:
    """Its branch is cancelled while the server makes the state: whose id must still come to be dropped."""

    @pl.function
    def program(s: pl.State, i: int) -> None:
        s += f"{i}" + pl.gen("x", max_tokens=2)
        raise ValueError(i)

    found = program.run_batch([{"i": i} for i in range(60)], backend=remote)
    assert all(isinstance(state.error(), ValueError) for state in found)
    time.sleep(0.5)  # for what might still come
    assert states(lang_server) == 0


def test_errors_keep_their_kind_and_name_the_server(remote: HttpBackend) -> None:
    @pl.function
    def program(s: pl.State, **params: Any) -> None:
        s += "x" + pl.gen("a", **params)

    long = program.run(backend=remote, max_tokens=100_000).error()
    assert long is not None
    assert type(long).__name__ == "ContextError"
    assert remote.url in str(long)
    bad = program.run(backend=remote, logit_bias={10_000: 1.0}).error()
    assert isinstance(bad, RequestError)
    assert bad.param == "logit_bias"
    assert isinstance(program.run(backend=remote, regex="(?=a)").error(), RequestError)
    with pytest.raises(RequestError):
        list(program.run(backend=remote, stream=True, regex="(?=a)").text_iter())
    empty = pl.function(lambda s: s.__iadd__(pl.gen("a"))).run(backend=remote).error()
    assert isinstance(empty, RequestError)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_unicode_is_refused_where_it_is_read(remote: HttpBackend, stream: bool) -> None:
    @pl.function
    def program(s: pl.State, text: str, choice: str) -> None:
        s += "Begin" + pl.gen("a", max_tokens=1)
        s += text + pl.gen("b", max_tokens=1, stop=choice)

    for given in ({"text": "a\ud800", "choice": "b"}, {"text": "a", "choice": "\udfff"}):
        state = program.run(**given, backend=remote, stream=stream)
        assert isinstance(state["a"], str)
        with pytest.raises(RequestError, match="lone surrogate"):
            _ = state["b"]


def test_a_program_of_one_call_is_one_request_and_its_end_waits_for_nobody(lang_server: Live) -> None:
    @pl.function
    def one(s: pl.State, i: int) -> None:
        s += f"Number {i}" + pl.gen("x", max_tokens=2)

    @pl.function
    def forked(s: pl.State) -> None:
        s += "A fork is the first"
        branches = s.fork(2)
        branches += pl.gen("x", max_tokens=2)
        branches.join()

    asked: list[tuple[str, int]] = []
    with HttpBackend(lang_server.url) as backend:
        call, drop = backend.call, backend._drop

        async def noted(method: str, path: str, body: Any = None) -> Any:
            asked.append((path, 1))
            return await call(method, path, body)

        def dropped(ids: list[str]) -> None:
            asked.append(("delete", len(ids)))
            drop(ids)

        backend.call, backend._endings._send = noted, dropped  # type: ignore[method-assign]
        states_ = one.run_batch([{"i": i} for i in range(20)], backend=backend)
        assert [state.error() for state in states_] == [None] * 20
        backend.flush_ended()
        assert sum(path == "/v1/programs" for path, _ in asked) == 20
        deletions = [count for path, count in asked if path == "delete"]
        assert sum(deletions) == 20
        assert len(asked) == 20 + len(deletions)
        assert states(lang_server) == 0
        asked.clear()
        assert None not in forked.run(backend=backend)["x"]
        assert sum(path.endswith("/generate") for path, _ in asked) == 2
        assert sum(path == "/v1/programs" for path, _ in asked) == 1
        assert not any(path.endswith("/fork") for path, _ in asked)
    assert states(lang_server) == 0, "closing it has dropped the rest"


def test_endings_are_gathered_and_none_is_lost() -> None:
    sent: list[list[str]] = []
    endings = Endings(lambda ids: (time.sleep(0.01), sent.append(ids))[1])
    threads = [threading.Thread(target=lambda k=k: [endings.add(f"{k} {i}") for i in range(300)]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    endings.flush()
    assert sorted(state for ids in sent for state in ids) == sorted(f"{k} {i}" for k in range(4) for i in range(300))
    assert max(map(len, sent)) <= MOST
    assert len(sent) < 40
    endings.add("last")
    time.sleep(5 * GATHER_S)
    assert sent[-1] == ["last"]


def test_a_state_that_the_server_has_lost(remote: HttpBackend, lang_server: Live) -> None:
    """As after a restart: the ids mean nothing to the server any more."""

    async def main() -> None:
        path = remote.start()
        path.append("Begin.")
        await path.generate(GREEDY)
        lang_server.http.delete(f"/v1/programs/{path._id}")  # type: ignore[attr-defined]
        branch = path.fork(1)[0]
        for on_text in (None, str):
            with pytest.raises(RequestError, match="lost the state of this program") as caught:
                await path.generate(GREEDY, on_text)  # type: ignore[arg-type]
            assert "restarted" in str(caught.value)
            assert "idle_s" in str(caught.value)
        with pytest.raises(RequestError, match="lost the state"):
            await branch.generate(GREEDY)
        await path.close()
        await branch.close()

    asyncio.run(main())


def test_idle_states_expire_with_a_clear_error(lang_server: Live) -> None:
    backend = HttpBackend(lang_server.url, idle_s=0.2)

    async def main() -> None:
        path = backend.start()
        path.append("Begin.")
        await path.generate(GREEDY)
        end = time.monotonic() + 20
        while states(lang_server):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        with pytest.raises(RequestError, match="lost the state"):
            await path.generate(GREEDY)

    asyncio.run(main())


def test_a_program_goes_on_when_the_model_process_is_back(remote: HttpBackend, lang_server: Live) -> None:
    """States are kept by the process that speaks HTTP: only what was computed is lost."""

    async def main() -> None:
        path = remote.start()
        path.append("Begin")
        made = await path.generate(GREEDY)
        pid = lang_server.model_pid
        os.kill(pid, signal.SIGKILL)
        lang_server.until(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(EngineDeadError, match=remote.url):
            await path.generate(GREEDY)
        lang_server.until(lambda: lang_server.status("/ready") == 200, 120)
        again = await path.generate(GREEDY)
        whole = remote.start()
        whole.append("Begin")
        expected = await whole.generate(SamplingParams(max_tokens=10, temperature=0))
        assert made.texts[0] + again.texts[0] == expected.texts[0]
        await path.close()
        await whole.close()

    asyncio.run(main())


def test_an_operation_brings_its_text_and_takes_it_back_if_it_fails(lang_server: Live) -> None:
    def post(path: str, **body: Any) -> Any:
        return lang_server.http.post(f"/v1/programs{path}", json=body)

    def text(path: str) -> str:
        found: str = lang_server.http.get(f"/v1/programs{path}").json()["text"]
        return found

    greedy = {"max_tokens": 3, "temperature": 0}
    path, other = (f"/{post('', text='Begin').json()['id']}" for _ in range(2))
    assert post(f"{other}/append", text=" here").status_code == 200
    ways = [
        post(f"{one}/generate", sampling_params=greedy, **more)
        for one, more in ((path, {"text": " here"}), (other, {}))
    ]
    assert ways[0].json()["token_ids"] == ways[1].json()["token_ids"]
    assert text(path) == text(other)
    before = text(path)
    for what, wrong in (
        ("generate", {"sampling_params": {"max_tokens": 100_000}}),
        ("generate", {"sampling_params": greedy | {"top_p": 3.0}}),
        ("select", {"choices": ["a"], "method": "best"}),
        ("fork", {"n": 5000}),
    ):
        assert post(f"{path}/{what}", text=" lost", **wrong).status_code >= 400
        assert text(path) == before
    assert post(f"{path}/select", text=" It is", choices=[" a", " b"]).status_code == 200
    (branch,) = post(f"{path}/fork", text=" so", n=1).json()["ids"]
    assert text(path) in (f"{before} It is a so", f"{before} It is b so")
    assert text(f"/{branch}") == text(path)
    kept = post(f"{path}/generate", text=" far", sampling_params=greedy, append=False)
    assert kept.status_code == 200
    assert text(path).endswith(" so far")
    for one in (path, other, f"/{branch}"):
        assert lang_server.http.delete(f"/v1/programs{one}").status_code == 200


def test_one_backend_on_several_loops_closes_on_each(lang_server: Live) -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "Begin" + pl.gen("x", max_tokens=2)

    clients = []
    backend = HttpBackend(lang_server.url)

    async def main() -> None:
        for _ in range(2):  # it can be used again after it was closed
            state = await program.arun(backend=backend, temperature=0)
            assert state["x"] == program_text
            clients.append(backend._clients.get())
            backend.close()
            await asyncio.sleep(0.1)
            assert clients[-1].is_closed
        await backend.aclose()

    with backend:
        program_text = program.run(backend=backend, temperature=0)["x"]
        clients += backend._clients._clients.values()
        asyncio.run(main())
    assert len(set(map(id, clients))) == 3
    assert all(client.is_closed for client in clients)


def test_many_programs_at_once(remote: HttpBackend) -> None:
    @pl.function
    async def program(s: pl.State, i: int) -> None:
        s += f"Number {i}:" + pl.gen("x", max_tokens=2)
        s += pl.gen("y", max_tokens=2)
        assert await s.get("y") is not None

    done = program.run_batch([{"i": i} for i in range(30)], backend=remote, temperature=0)
    assert all(state.error() is None and isinstance(state["y"], str) for state in done)


def test_others_than_phloem_and_nobody_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_error(404)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.raises(RequestError, match=r"offers no programs(.|\n)*OpenAI\(\.\.\.\)"):
            pl.RuntimeEndpoint(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(EngineDeadError, match="does not answer"):
        pl.RuntimeEndpoint(f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(sys.modules, "httpx", None)
    for make in (pl.RuntimeEndpoint, pl.Runtime):
        with pytest.raises(PluginError, match=r"needs the package httpx(.|\n)*pip install 'phloem\[lang\]'"):
            make("http://127.0.0.1:1")


def test_a_runtime_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"status 2:\n.*cache\.tokenss: unknown key \(did you mean 'tokens'"):
        Runtime("smollm2-135m", cache={"tokenss": 4096})


@pytest.mark.real
def test_a_runtime_on_the_default_model_until_its_server_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG_TEST_KEY", "secret")
    settings: dict[str, Any] = {"cache": {"tokens": 2048}, "server": {"api_key": {"env": "LANG_TEST_KEY"}}}
    runtime = Runtime("smollm2-135m", api_key="secret", engine={"threads": 2}, **settings)

    @pl.function
    def capital(s: pl.State) -> None:
        s += pl.user("What is the capital of France? Answer with one word.")
        s += pl.assistant(pl.gen("answer", max_tokens=8, temperature=0))
        s += pl.user("Is it in Europe?")
        s += pl.assistant(pl.select("europe", choices=["Yes", "No"]))

    @pl.function
    def broken(s: pl.State) -> None:
        s += "Once upon a time" + pl.gen("a", max_tokens=4)
        assert isinstance(s["a"], str)
        os.kill(runtime.pid, signal.SIGKILL)
        s += pl.gen("b", max_tokens=4)

    try:
        state = capital.run(backend=runtime)
        assert "Paris" in state["answer"]
        assert state["europe"] in ("Yes", "No")
        with pytest.raises(RequestError, match="api_key") as refused:
            HttpBackend(runtime.url)
        assert refused.value.status == 401
        dead = broken.run(backend=runtime).error()
        assert isinstance(dead, EngineDeadError)
        assert f"{runtime.url} does not answer" in str(dead)
    finally:
        runtime.close()
        runtime.close()
    assert not Path(f"/proc/{runtime.pid}").exists()
