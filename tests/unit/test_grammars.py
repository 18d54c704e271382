"""Constraints of requests: who compiles them, what is kept, who waits; alone and inside an engine."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from equivalence.harness import engine
from process_tree import computing, descendants, until

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.errors import ConfigError, PhloemError, PluginError, QueueFullError, RequestError, StepError
from phloem.grammars import Grammars, Ticket
from phloem.interfaces import TokenizerData
from phloem.testing.grammar import toy_tokenizer
from phloem.testing.plugin import TOY_SPEC

WILD = Path(__file__).with_name("wild_grammars.py")
TOY = "phloem.testing.toy_grammar:ToyGrammar"


class Rig:
    """A service over some backends; `wait` plays the loop."""

    def __init__(self, **section: Any) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        config = load_config(sections={"grammar": section}, env={})
        data, tokenizer = toy_tokenizer()._backend.to_str(), toy_tokenizer()
        self.service = Grammars(config.grammar, TOY_SPEC, tokenizer, TokenizerData(data), self.inbox.put)

    def wait(self, ticket: Ticket) -> Any:
        while not ticket.done.done():
            self.inbox.get(timeout=30)()
        return ticket.done.result()

    def ask(self, **params: Any) -> Any:
        return self.wait(self.service.ask(SamplingParams(**params)))

    def refusal(self, **params: Any) -> PhloemError:
        with pytest.raises(PhloemError) as refused:
            self.ask(**params)
        return refused.value

    def counts(self, *names: str) -> tuple[int, ...]:
        stats = self.service.stats()
        return tuple(stats[name] for name in names)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(use: str, **section: Any) -> Rig:
        made.append(Rig(use=use, **section))
        return made[-1]

    yield make
    for one in made:
        one.service.close()


@pytest.fixture(scope="module")
def picky() -> Iterator[Rig]:
    made = Rig(use=f"{WILD}:Picky", also=[f"{WILD}:Liberal"])
    yield made
    made.service.close()


# --- which backend


def test_without_a_backend_the_pip_line_is_shown(rig: Callable[..., Rig]) -> None:
    none = rig("none")
    error = none.refusal(json_schema=True)
    assert error.message == "json_schema cannot be honoured: this engine runs without a grammar backend"
    assert error.hint == "configure one: `grammar: {use: xgrammar}`, after pip install 'phloem[xgrammar]'"
    assert (error.param, error.status) == ("json_schema", 400)
    assert none.ask() is None


def test_what_a_backend_would_let_pass_is_refused_with_its_pointers(picky: Rig) -> None:
    error = picky.refusal(json_schema={"pattern": "x", "uniqueItems": True, "multipleOf": 2})
    assert error.message == (
        "Picky cannot enforce all of this json_schema: "
        "#/uniqueItems: Picky ignores uniqueItems; #/multipleOf: Picky ignores multipleOf"
    )
    assert (
        error.hint == "leave it out, try another backend (grammar_backend: 'Liberal'), or allow it with strict: false"
    )
    assert error.param == "json_schema"
    many = picky.refusal(json_schema={f"x{i}": 1 for i in range(10)})
    assert many.message.endswith("#/x7: Picky ignores x7; and 2 more")


def test_strict_false_says_in_notes_what_is_not_enforced(picky: Rig) -> None:
    compiled = picky.ask(json_schema={"multipleOf": 2}, strict=False)
    assert compiled.notes == ["not enforced by Picky: #/multipleOf: Picky ignores multipleOf"]


def test_a_request_may_name_a_backend(picky: Rig) -> None:
    compiled = picky.ask(json_schema={"multipleOf": 2}, grammar_backend="Liberal")
    assert (compiled.notes, compiled.matcher.fork().accept(10)) == ([], True)  # a digit
    error = picky.refusal(regex="a", grammar_backend="Liberel")
    assert error.message == "grammar_backend 'Liberel' is not configured (did you mean 'Liberal'?)"
    assert (error.hint, error.param) == ("list it under `grammar: {also: [...]}`", "grammar_backend")


def test_a_kind_that_a_backend_lacks_is_refused_by_its_name(picky: Rig) -> None:
    error = picky.refusal(regex="a", grammar_backend="Liberal")
    assert (error.message, error.hint) == ("Liberal has no regex", "try another backend: grammar_backend: 'Picky'")
    error = picky.refusal(lark="start: A")
    assert error.message == "Picky has no lark (lark is the dialect of llguidance)"
    assert error.hint == "try another backend: `grammar: {use: auto}`, or `also: [llguidance]`"
    assert "ebnf is the dialect of xgrammar" in picky.refusal(ebnf="root ::= 'a'").message


def test_auto_takes_the_first_that_enforces_all(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.grammars._installed", lambda name: True)
    names = (f"{WILD}:Picky", "not_there:X", f"{WILD}:Liberal")
    monkeypatch.setitem(__import__("phloem.registry").registry.AUTO, "grammar", (names[0], names[2]))
    auto = rig("auto")
    assert auto.ask(json_schema={"pattern": "x"}).matcher.fork().accept(2)
    assert auto.ask(json_schema={"multipleOf": 2}).matcher.fork().accept(10)
    assert auto.ask(json_schema={"multipleOf": 2}, strict=False).notes
    assert auto.ask(regex="[ab]").notes == []
    error = auto.refusal(choices=["a"])
    assert error.message.startswith("no backend can enforce this choices: ")
    assert "Picky has no choices" in error.message
    assert "Liberal has no choices" in error.message


def test_the_default_gives_way_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(env={}).grammar.use == "xgrammar"
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "xgrammar" else found(name))
    assert load_config(env={}).grammar.use == "none"


def test_unusable_backends_are_fatal(rig: Callable[..., Rig]) -> None:
    with pytest.raises(ConfigError, match=r"no grammar plugin is named 'xgramar' .did you mean 'xgrammar'"):
        rig("xgramar")
    with pytest.raises((ConfigError, PluginError), match="no grammar plugin is named 'outline'"):
        rig(TOY, also=["outline"])


# --- what is kept


def test_a_constraint_is_compiled_once_and_forked(rig: Callable[..., Rig], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    wild = rig(f"{WILD}:Wild", journal=str(journal))
    first, second = wild.service.ask(SamplingParams(regex="ab")), wild.service.ask(SamplingParams(regex="ab"))
    assert wild.counts("waiting") == (2,)
    assert wild.wait(first) is wild.wait(second)
    third = wild.service.ask(SamplingParams(regex="ab"))
    assert third.done.done()
    own = [wild.service.matcher(third.done.result(), SamplingParams(regex="ab"), [5]) for _ in range(2)]
    assert own[0] is not None
    assert own[0].accept(2)
    assert own[1] is not None
    assert not own[1].accept(3)
    assert journal.read_text() == "ab\n"
    assert wild.counts("compiled", "cache_hits", "refused", "timeouts", "waiting", "kept") == (1, 1, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "other", [{"strict": False}, {"grammar_backend": "Liberal"}, {"json_schema": {"pattern": "y"}}, {"regex": '{"a"}'}]
)
def test_whatever_changes_the_result_is_in_the_key(rig: Callable[..., Rig], other: dict[str, Any]) -> None:
    picky = rig(f"{WILD}:Picky", also=[f"{WILD}:Liberal"])
    given = {"json_schema": {"pattern": "x"}}
    picky.ask(**given)
    picky.ask(**(given | other if "regex" not in other else other))
    assert picky.counts("compiled", "cache_hits") == (2, 0)


def test_an_invalid_constraint_is_remembered_as_such(rig: Callable[..., Rig], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    wild = rig(f"{WILD}:Wild", journal=str(journal))
    errors = [wild.refusal(regex="!invalid") for _ in range(3)]
    assert {(type(e), e.message, e.hint, e.param) for e in errors} == {
        (RequestError, "this is no regex", "write one", "regex")
    }
    assert journal.read_text() == "!invalid\n"
    assert wild.counts("refused", "cache_hits", "kept") == (1, 2, 1)


@pytest.mark.parametrize("deed", ["!zero", "!exit", "!eat"])
def test_what_tells_nothing_of_a_constraint_is_not_remembered(
    rig: Callable[..., Rig], tmp_path: Path, deed: str
) -> None:
    journal = tmp_path / "journal"
    wild = rig(f"{WILD}:Wild", journal=str(journal), memory=64 << 20)
    assert wild.refusal(regex=deed).message == wild.refusal(regex=deed).message
    assert journal.read_text() == f"{deed}\n" * 2
    assert wild.counts("kept", "bytes") == (0, 0)


def test_a_timeout_is_not_remembered_as_invalid(rig: Callable[..., Rig]) -> None:
    wild = rig(f"{WILD}:Wild", timeout_s=0.2)
    error = wild.refusal(regex="!backtrack")
    assert (type(error), error.message) == (RequestError, "compiling this regex took longer than 0.2 s")
    assert not wild.service.ask(SamplingParams(regex="!backtrack")).done.done()
    assert wild.counts("timeouts", "kept") == (1, 0)


def test_the_least_recently_used_goes_first(rig: Callable[..., Rig]) -> None:
    wild = rig(f"{WILD}:Wild", cache_size=100_000)
    for regex in ("a", "b", "c"):
        wild.ask(regex=regex)
    assert wild.counts("kept") == (3,)
    wild.ask(regex="a")
    wild.ask(regex="d")
    assert wild.service.stats()["bytes"] <= 100_000
    hits = wild.service.stats()["cache_hits"]
    wild.ask(regex="a")
    assert wild.service.stats()["cache_hits"] == hits + 1
    assert not wild.service.ask(SamplingParams(regex="b")).done.done()


def test_nothing_is_kept_where_nothing_fits(rig: Callable[..., Rig]) -> None:
    wild = rig(f"{WILD}:Wild", cache_size=0)
    for _ in range(2):
        wild.ask(regex="a")
        wild.refusal(regex="!invalid")
    assert wild.counts("compiled", "refused", "cache_hits", "kept", "bytes") == (2, 2, 0, 0, 0)


def test_a_long_constraint_is_refused_before_anybody_reads_it(rig: Callable[..., Rig]) -> None:
    wild = rig(f"{WILD}:Wild", max_source="1k")
    with pytest.raises(RequestError, match="regex of 2000 bytes exceeds the limit of 1024") as refusal:
        wild.service.ask(SamplingParams(regex="é" * 1000))
    assert (refusal.value.hint, refusal.value.param) == ("grammar.max_source sets it", "regex")
    assert wild.counts("waiting") == (0,)


# --- who waits


def test_one_who_leaves_takes_the_job_along_only_if_alone(rig: Callable[..., Rig]) -> None:
    wild = rig(f"{WILD}:Wild")
    params = SamplingParams(regex="!sleep a")
    stays, leaves = wild.service.ask(params), wild.service.ask(params)
    wild.service.cancel(leaves)
    wild.service.cancel(leaves)
    assert wild.wait(stays).size == 1
    assert not leaves.done.done()
    alone = wild.service.ask(SamplingParams(regex="!backtrack"))
    until(lambda: computing(os.getpid()) != [])
    wild.service.cancel(alone)
    until(lambda: computing(os.getpid()) == [], 5)
    again = wild.service.ask(SamplingParams(regex="!backtrack"))  # the end of the first job is not taken for its own
    wild.inbox.get(timeout=30)()
    assert not again.done.done()
    wild.service.cancel(again)
    assert wild.ask(regex="a").size == 1
    assert wild.counts("waiting", "refused") == (0, 0)


# --- in an engine


@pytest.fixture(scope="module")
def running(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    section = {"use": f"{WILD}:Wild", "also": [f"{WILD}:Picky"], "timeout_s": 5.0}
    with engine(tiny_model("llama"), grammar=section, schedule={"max_waiting": 8}, spec=[]) as made:
        made.generate("warm", SamplingParams(regex="a", max_tokens=4))
        yield made
        made.check()


def params(regex: str, **more: Any) -> SamplingParams:
    return SamplingParams(regex=regex, max_tokens=20, **more)


def test_others_run_while_a_constraint_is_compiled(running: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.generate, "x", params("!sleep (yes|no)", n=3))
        until(lambda: running.stats()["grammar"]["waiting"] == 1)
        assert running.stats()["waiting"] == 0
        steps = running.stats()["steps"]
        assert running.generate("y", SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        assert running.generate("z", params("a")).text == "a"
        assert running.stats()["steps"] > steps
        assert not slow.done()
        assert {output.text for output in slow.result().outputs} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("regex", "error", "words"),
    [
        ("!invalid", RequestError, "this is no regex"),
        ("!zero", PhloemError, "the grammar backend failed: ZeroDivisionError"),
        ("!crash", RequestError, "ended its process"),
        ("unreadable", PhloemError, "compiling failed: UnicodeError: what is this"),
        ("broken", StepError, "the grammar failed: ArithmeticError"),
        ("endless", StepError, "the grammar failed: ArithmeticError"),
    ],
)
def test_what_goes_wrong_ends_its_own_call(running: Engine, regex: str, error: type[PhloemError], words: str) -> None:
    bystander = running.stream("y", SamplingParams(max_tokens=200, ignore_eos=True))
    next(bystander)
    for n in (1, 2):
        with pytest.raises(error, match=words):
            running.generate("x", params(regex, n=n))
    assert next(bystander).token_ids
    bystander.close()
    assert running.generate("x", params("[ab]")).text in ("a", "b")


def test_a_timeout_ends_its_own_call(tiny_model: Callable[[str], Path]) -> None:
    section = {"use": f"{WILD}:Wild", "timeout_s": 0.3}
    with engine(tiny_model("llama"), grammar=section, spec=[]) as short, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(short.generate, "x", params("!backtrack"))
        assert short.generate("y", SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        with pytest.raises(RequestError, match=r"compiling this regex took longer than 0\.3 s"):
            slow.result()
        assert short.stats()["grammar"]["timeouts"] == 1
        assert short.stats()["requests"]["error"] == 1


def test_no_cpu_is_used_one_second_after_an_abort(running: Engine) -> None:
    """The client of a catastrophic constraint goes away, and so does the work for it."""

    async def leave() -> None:
        call = asyncio.ensure_future(running.agenerate("x", params("!backtrack")))
        while not computing(os.getpid()):
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(leave())
    time.sleep(1)
    before, own = descendants(os.getpid()), time.process_time()
    time.sleep(0.5)
    after, own_after = descendants(os.getpid()), time.process_time()
    assert sum(after.values()) - sum(before.values()) <= 1
    assert own_after - own < 0.05  # the loop's thread sleeps too
    assert running.stats()["grammar"]["waiting"] == 0
    assert running.generate("x", params("ab")).text == "ab"


def test_a_waiting_constraint_costs_the_loop_nothing(running: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.generate, "x", params("!sleep a"))
        until(lambda: running.stats()["grammar"]["waiting"] == 1)
        own = time.process_time()
        assert slow.result().text == "a"
        assert time.process_time() - own < 0.15


def test_compiling_requests_count_as_waiting(running: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.generate, "x", params("!sleep b", n=6))
        until(lambda: running.stats()["grammar"]["waiting"] == 1)
        with pytest.raises(QueueFullError, match="6 requests are waiting, the limit is 8"):
            running.generate("y", params("a", n=3))
        assert running.generate("y", params("a", n=2)).text == "a"
        assert slow.result().text == "b"


def test_notes_arrive_with_the_end(running: Engine) -> None:
    given = SamplingParams(json_schema={"multipleOf": 2}, grammar_backend="Picky", strict=False, max_tokens=3)
    result = running.generate("x", given)
    assert result.outputs[0].notes == ["not enforced by Picky: #/multipleOf: Picky ignores multipleOf"]
    assert running.generate("x", params("a")).outputs[0].notes == []


def test_closing_ends_calls_that_wait(tiny_model: Callable[[str], Path]) -> None:
    others = set(descendants(os.getpid()))
    made = engine(tiny_model("llama"), grammar={"use": f"{WILD}:Wild"}, spec=[])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(made.generate, "x", params("!backtrack"))
        until(lambda: made.stats()["grammar"]["waiting"] == 1)
        made.close()
        assert slow.result().finish_reason == "abort"
    until(lambda: set(descendants(os.getpid())) == others, 5)
    assert not [thread for thread in threading.enumerate() if thread.name == "phloem-loop" and not thread.is_alive()]


def test_many_callers_and_many_constraints(running: Engine) -> None:
    patterns = [f"{word}[0-9]" for word in ("ab", "cd", "ef", "gh")]

    def call(i: int) -> None:
        pattern = patterns[i % 4]
        for _ in range(3):
            assert re.fullmatch(pattern, running.generate("x", params(pattern, temperature=1.0)).text)

    before = running.stats()["grammar"]["compiled"]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    assert running.stats()["grammar"]["compiled"] == before + 4


# --- backends and parsers that the configuration names


def test_a_further_backend_that_is_not_installed_is_an_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "phloem.plugins.grammar.llguidance", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    path = tmp_path / "engine.yaml"
    path.write_text("grammar:\n  use: none\n  also: [outlines, llguidance, outline]\n")
    with pytest.raises(ConfigError) as error:
        load_config(str(path), env={})
    missing, unknown = error.value.problems
    assert missing.startswith(f"{path}:3:20: grammar.also[1]: grammar plugin 'llguidance' cannot be imported")
    assert missing.endswith("; pip install 'phloem[llguidance]'")
    assert unknown.startswith(f"{path}:3:32: grammar.also[2]: ")
    assert "did you mean 'outlines'?" in unknown


def test_plugin_files_start_from_the_folder_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "mine.py").write_text(
        "from phloem.plugins.grammar.outlines import Outlines as Mine\nfrom phloem.plugins.parser.think import Think\n"
    )
    path = tmp_path / "engine.yaml"
    path.write_text(
        "grammar: {use: none, also: ['./mine.py:Mine']}\n"
        "server: {tool_parser: ./mine.py:Tools, reasoning_parser: {use: ./mine.py:Think, opened: true}}\n"
    )
    config = load_config(str(path), env={})
    assert config.grammar.also == (f"{tmp_path}/mine.py:Mine",)
    assert config.server.tool_parser == f"{tmp_path}/mine.py:Tools"
    assert config.server.reasoning_parser == {"use": f"{tmp_path}/mine.py:Think", "opened": True}
