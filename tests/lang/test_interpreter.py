"""The interpreter against a backend that is told what to do: order, forks, joins, errors, cancellation, threads."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from typing import Any

import pytest
from scripted import Scripted

import phloem.lang as pl
from phloem.errors import AbortedError, ConfigError, RequestError
from phloem.lang import session as sessions


def test_text_gens_and_variables_come_in_order(backend: Scripted) -> None:
    @pl.function
    def program(s: Any, word: str) -> str:
        s += "a " + pl.gen("x", max_tokens=1) + f" b {word} "
        s += pl.gen("y")
        s["z"] = 7
        return str(s["x"])

    state = program.run("w", backend=backend, max_new_tokens=5)
    assert state.text() == "a [0:1] b w [0:5]"
    assert (state["x"], state["y"], state["z"], state.ret_value) == ("[0:1]", "[0:5]", 7, "[0:1]")
    assert state.get_meta_info("x")["finish_reason"] == {"type": "length"}
    assert "x" in state
    assert "q" not in state
    assert state.error() is None


def test_nothing_is_sent_for_text_alone(backend: Scripted) -> None:
    """Lazy commit: the backend learns of text with the next gen only."""

    @pl.function
    def program(s: Any) -> None:
        s += "only text"

    state = program.run(backend=backend)
    assert state.text() == "only text"
    assert backend.events == []


def test_many_choices_of_one_gen(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("x", n=3, max_tokens=2)

    state = program.run(backend=backend)
    assert state["x"] == ["[0:2]", "[1:2]", "[2:2]"]
    assert state.text() == "[0:2]"
    assert len(state.get_meta_info("x")) == 3


def test_a_variable_that_is_not_there(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("x")
        s["y"]

    with pytest.raises(KeyError, match=r"no such variable.*x"):
        program.run(backend=backend)


def test_nested_forks_and_join_order(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "root"
        outer = s.fork(3)
        for i, child in enumerate(outer):
            child += f" {i}"
            inner = child.fork(2)
            inner += lambda j: f".{j}" + pl.gen("leaf", max_tokens=j + 1)
            inner.join()
            child += pl.gen("own", max_tokens=i + 1)
        outer.join()
        assert [child.text() for child in outer] == [f"root {i}[0:{i + 1}]" for i in range(3)]

    state = program.run(backend=backend)
    assert state["leaf"] == [["[0:1]", "[0:2]"]] * 3
    assert state["own"] == ["[0:1]", "[0:2]", "[0:3]"]
    assert state.text() == "root"


def test_join_that_concatenates(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "head:"
        forks = s.fork(3)
        forks += [f" {word}" + pl.gen(max_tokens=i + 1) for i, word in enumerate("abc")]
        forks.join("concate_and_append")
        s += " tail" + pl.gen("x")

    assert program.run(backend=backend).text() == "head: a[0:1] b[0:2] c[0:3] tail[0:128]"


def test_a_fork_is_made_before_its_parent_got_there() -> None:
    """Nothing waits: branches are written while the parent's own gen still runs."""
    backend = Scripted(delay_s=0.2)

    @pl.function
    def program(s: Any) -> float:
        begin = time.monotonic()
        s += "p" + pl.gen("x", max_tokens=1)
        forks = s.fork(4)
        forks += "c" + pl.gen("y", max_tokens=2)
        forks.join()
        return time.monotonic() - begin

    state = program.run(backend=backend)
    assert state.ret_value < 0.15
    assert state["y"] == ["[0:2]"] * 4
    assert backend.most_running == 4
    assert backend.open == 0


def test_branches_inherit_variables_messages_and_open_roles(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> list[Any]:
        s += pl.user("q" + pl.gen("early", max_tokens=1))
        s += pl.assistant_begin()
        (child,) = s.fork(1)
        child += pl.gen("late", max_tokens=2) + pl.assistant_end()
        return [child["early"], child.messages(), child.text()]

    early, messages, text = program.run(backend=backend).ret_value
    assert early == "[0:1]"
    assert messages == [{"role": "user", "content": "q[0:1]"}, {"role": "assistant", "content": "[0:2]"}]
    assert text == "<user>q[0:1]</user><assistant>[0:2]</assistant>"


def test_a_second_join_replaces_a_variable_of_the_first(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> list[Any]:
        seen = []
        for size in (2, 3):
            forks = s.fork(size)
            forks += pl.gen("x", max_tokens=size)
            forks.join()
            seen.append(s["x"])
        return seen

    assert program.run(backend=backend).ret_value == [["[0:2]"] * 2, ["[0:3]"] * 3]


def test_copy_scopes_and_roles(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        with s.user():
            s += "hi"
        with s.assistant(), s.var_scope("whole"):
            s += "well " + pl.gen("x", max_tokens=1)
        with s.copy() as branch:
            branch += pl.gen("y", max_tokens=2)

    state = program.run(backend=backend)
    assert state["whole"] == "well [0:1]"
    assert state["y"] == ["[0:2]"]
    assert [m["role"] for m in state.messages()] == ["user", "assistant"]


def test_nested_roles_are_an_error(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.user_begin() + pl.assistant("x")

    error = program.run(backend=backend).error()
    assert isinstance(error, RequestError)
    assert "inside a user message" in error.message


def test_an_error_in_a_branch_leaves_the_others(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> list[Any]:
        forks = s.fork(3)
        forks += lambda i: ("fail" if i == 1 else "fine") + pl.gen("x", max_tokens=i + 1)
        forks.join()
        with pytest.raises(RequestError, match="told to fail"):
            forks[1]["x"]
        return forks.errors()

    state = program.run(backend=backend)
    assert state["x"] == ["[0:1]", None, "[0:3]"]
    assert [type(error) for error in state.ret_value] == [type(None), RequestError, type(None)]
    assert state.error() is None


def test_a_failed_branch_fails_what_concatenates_it(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: ("fail" if i else "fine") + pl.gen()
        forks.join("concate_and_append")
        s += pl.gen("after")

    state = program.run(backend=backend)
    assert isinstance(state.error(), RequestError)
    with pytest.raises(RequestError, match="told to fail"):
        state["after"]


def test_after_an_error_what_was_there_stays_readable(backend: Scripted) -> None:
    """And a branch made before goes on: that is how a program tries something that may fail."""

    @pl.function
    def program(s: Any) -> str:
        s += "a" + pl.gen("x", max_tokens=1)
        (attempt,) = s.fork(1)
        attempt += "fail" + pl.gen("y") + "never"
        with pytest.raises(RequestError, match="told to fail"):
            attempt["y"]
        assert attempt["x"] == "[0:1]"
        assert attempt.text() == "a[0:1]fail"
        attempt += "more" + pl.gen("z")  # of no effect, and no new error
        with pytest.raises(RequestError, match="told to fail"):
            attempt["z"]
        assert str(attempt.error()) == "told to fail"
        s += " instead" + pl.gen("y", max_tokens=3)
        return str(s["y"])

    state = program.run(backend=backend)
    assert state.ret_value == "[0:3]"
    assert state.text() == "a[0:1] instead[0:3]"


def test_an_error_of_the_body_is_raised_and_everything_released(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += "hang" + pl.gen("x")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        program.run(backend=backend)
    assert backend.open == 0


def test_an_error_before_a_fork_reaches_its_branches(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> Any:
        s += "fail" + pl.gen("x")
        forks = s.fork(2)
        forks += pl.gen("y")
        return forks[1].error()

    assert isinstance(program.run(backend=backend).ret_value, RequestError)


def test_cancel_of_losing_branches(backend: Scripted) -> None:
    backend.delay_s = 0.1  # all run when the first is there

    @pl.function
    def program(s: Any) -> list[Any]:
        s += "p"
        forks = s.fork(3)
        forks += lambda i: (" quick" if i == 0 else " hang") + pl.gen("x", max_tokens=1)
        deep = forks[1].fork(1)[0]
        deep += pl.gen("z")
        first = forks[0]["x"]
        forks.cancel(keep=forks[0])
        forks.join()
        with pytest.raises(AbortedError):
            deep["z"]
        with pytest.raises(AbortedError, match="cancelled"):
            forks[2]["x"]
        return [first, s["x"], forks[2].text()]

    begin = time.monotonic()
    state = program.run(backend=backend)
    assert state.ret_value == ["[0:1]", ["[0:1]", None, None], "p hang"]
    assert time.monotonic() - begin < 5
    assert backend.events.count("cancelled") == 2


def test_a_cancelled_branch_adds_nothing_to_a_concatenation(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: ("hang" if i else "text") + pl.gen("x", max_tokens=1)
        forks[1].cancel()
        forks.join("concate_and_append")

    assert program.run(backend=backend).text() == "text[0:1]"


def test_streams_a_variable_while_later_ones_wait() -> None:
    backend = Scripted()

    @pl.function
    def program(s: Any) -> None:
        s += "go " + pl.gen("x", max_tokens=1) + " hang" + pl.gen("y")

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x")) == "[0:1]"
    pieces = state.text_iter()
    text = ""
    while not text.endswith("hang"):
        text += next(pieces)
    assert text == "go [0:1] hang"
    state.cancel()
    with pytest.raises(AbortedError):
        "".join(pieces)
    with pytest.raises(AbortedError):
        list(state.text_iter("y"))


def test_a_stream_may_be_read_before_the_body_names_the_variable(backend: Scripted) -> None:
    gate = threading.Event()

    @pl.function
    def program(s: Any) -> None:
        gate.wait(10)
        s += pl.gen("x", max_tokens=1)

    state = program.run(backend=backend, stream=True)
    threading.Timer(0.1, gate.set).start()
    assert "".join(state.text_iter("x")) == "[0:1]"
    with pytest.raises(KeyError):
        state["never"]
    assert "".join(state.text_iter()) == "[0:1]"


def test_an_error_of_a_streamed_body_ends_the_stream(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "text"
        s.sync()
        raise ZeroDivisionError("mine")

    state = program.run(backend=backend, stream=True)
    pieces = state.text_iter()
    assert next(pieces) == "text"
    with pytest.raises(ZeroDivisionError):
        next(pieces)
    assert isinstance(state.error(), ZeroDivisionError)


def test_without_stream_iterators_give_the_whole(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "a" + pl.gen("x", max_tokens=1)

    state = program.run(backend=backend)
    assert list(state.text_iter()) == ["a[0:1]"]
    assert list(state.text_iter("x")) == ["[0:1]"]


def test_a_state_whose_run_is_over_can_only_be_read(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("x", max_tokens=1)

    state = program.run(backend=backend)
    with pytest.raises(RuntimeError, match="can only be read"):
        state += "more"
    assert state["x"] == "[0:1]"


def test_nested_calls_share_the_state_and_runs_do_not(backend: Scripted) -> None:
    @pl.function
    def part(s: Any, word: str = "w") -> str:
        s += word + pl.gen("x", max_tokens=1)
        return word

    @pl.function
    def program(s: Any) -> list[str]:
        first = part(s, "a ")
        second = part.bind(word="b ")(s)
        other = part.run("c ", backend=backend)
        return [first, second, other.text()]

    state = program.run(backend=backend)
    assert state.ret_value == ["a ", "b ", "c [0:1]"]
    assert state.text() == "a [0:1]b [0:1]"


def test_nested_runs_do_not_deadlock(backend: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of one thread each: a body that waits never holds the thread that what it waits for needs."""
    monkeypatch.setattr(sessions, "MOST_THREADS", 1)
    monkeypatch.setattr(sessions.session, "_pools", [])

    @pl.function
    def leaf(s: Any, i: int) -> None:
        s += f"{i}" + pl.gen("x", max_tokens=1)

    @pl.function
    def middle(s: Any, i: int) -> str:
        states = leaf.run_batch([{"i": i * 10 + j} for j in range(3)], backend=backend)
        streamed = leaf.run(i, backend=backend, stream=True)
        return " ".join([*(state.text() for state in states), "".join(streamed.text_iter())])

    @pl.function
    def top(s: Any, i: int) -> list[Any]:
        return [state.ret_value for state in middle.run_batch([{"i": i}, {"i": i + 1}], backend=backend)]

    states = top.run_batch([{"i": 1}, {"i": 5}, {"i": 7}], backend=backend)
    assert [state.error() for state in states] == [None] * 3
    assert states[0].ret_value == ["10[0:1] 11[0:1] 12[0:1] 1[0:1]", "20[0:1] 21[0:1] 22[0:1] 2[0:1]"]


def test_threads_do_not_grow_with_forks(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> int:
        before = threading.active_count()
        forks = s.fork(200)
        forks += pl.gen("x", max_tokens=1)
        forks.join()
        s["x"]
        return threading.active_count() - before

    program.run(backend=backend)  # the loop's own thread
    assert program.run(backend=backend).ret_value <= 0


def test_priority_salt_and_sampling_pass_through(backend: Scripted) -> None:
    @pl.function
    def program(s: Any, temperature_word: str) -> None:
        s += temperature_word + pl.gen("x")

    state = program.run("t", backend=backend, priority=3, salt="tenant", max_tokens=9, seed=4)
    assert state["x"] == "[0:9]"
    assert backend.started == [{"priority": 3, "salt": "tenant"}]
    with pytest.raises(RequestError, match=r"no argument 'temperture'.*temperature"):
        program.run("t", backend=backend, temperture=0)


def test_without_a_backend() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "x"

    with pytest.raises(ConfigError, match="no backend"):
        program.run()
    with pytest.raises(ConfigError, match="is no backend"):
        program.run(backend=object())


def test_the_default_backend(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.gen("x", max_tokens=1)

    assert pl.flush_cache() is False
    assert pl.get_server_info() is None
    pl.set_default_backend(backend)
    try:
        assert program()["x"] == "[0:1]"
        assert pl.flush_cache() is True
        assert pl.get_server_info() == {"model_name": "scripted"}
    finally:
        pl.set_default_backend(None)
    assert backend.events[-1] == "flush"


def test_media_are_refused(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.user(pl.image("a.png") + "What is this?")
        s += pl.assistant(pl.gen("x"))

    with pytest.raises(RequestError, match="image needs a model with vision"):
        program.run(backend=backend)["x"]


def test_sync_reading_on_the_loop_is_refused(backend: Scripted) -> None:
    @pl.function
    async def program(s: Any) -> None:
        s += pl.gen("x")
        s["x"]

    with pytest.raises(RuntimeError, match="await"):
        program.run(backend=backend)
    with pytest.raises(RuntimeError, match="await"):
        asyncio.run(program.arun(backend=backend))


def test_sync_runs_on_the_loop_are_refused(backend: Scripted) -> None:
    @pl.function
    def inner(s: Any) -> None:
        s += "x"

    @pl.function
    async def program(s: Any) -> None:
        inner.run(backend=backend)

    with pytest.raises(RuntimeError, match="arun"):
        program.run(backend=backend)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_body_that_exits_does_so_in_its_callers_thread(backend: Scripted, kind: str) -> None:
    """And the loop that all programs share goes on."""

    @pl.function
    def plain(s: Any) -> None:
        s += "a" + pl.gen("x", max_tokens=1)
        raise SystemExit(3)

    @pl.function
    async def awaited(s: Any) -> None:
        plain(s)

    program = plain if kind == "plain" else awaited
    with pytest.raises(SystemExit):
        program.run(backend=backend)
    (state,) = program.run_batch([{}], backend=backend)
    assert isinstance(state.error(), AbortedError)
    assert pl.function(lambda s: None).run(backend=backend).error() is None


def test_a_stream_can_be_left(backend: Scripted) -> None:
    """Whoever stops reading stops nothing; the body ends by itself."""

    @pl.function
    def program(s: Any) -> None:
        s += "a" + pl.gen("x", max_tokens=1) + pl.gen("y", max_tokens=2)

    state = program.run(backend=backend, stream=True)
    assert next(state.text_iter())
    assert state["y"] == "[0:2]"
    state.branch.closed.wait(10)


def test_an_interrupt_stops_what_runs(backend: Scripted) -> None:
    """Ctrl-C while the body's last gen is awaited: it does not go on behind the program's back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    @pl.function
    def program(s: Any) -> None:
        s += "hang" + pl.gen("x", max_tokens=1)

    def interrupt() -> None:
        while not backend.running:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run(backend=backend)
    finally:
        signal.signal(signal.SIGINT, before)
    assert backend.events == ["cancelled"]


def test_forks_nested_deeper_than_the_stack_are_cancelled(backend: Scripted) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "root"
        leaf = s
        for _ in range(sys.getrecursionlimit() + 100):
            leaf = leaf.fork(1)[0]
        leaf += "hang" + pl.gen("x", max_tokens=1)
        s.cancel()

    state = program.run(backend=backend)
    assert isinstance(state.error(), AbortedError)


def test_a_message_that_an_error_leaves_is_closed(backend: Scripted) -> None:
    @pl.function
    def program(s: pl.State) -> None:
        try:
            with s.user(), s.var_scope("said"):
                s += "half of it"
                raise ValueError
        except ValueError:
            pass
        with s.assistant():
            s += pl.gen("answer", max_tokens=1)

    state = program.run(backend=backend)
    assert state.error() is None
    assert state["said"] == "half of it"
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]
    assert state.text().startswith("<user>half of it</user><assistant>")
