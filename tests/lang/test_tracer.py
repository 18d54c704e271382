"""Tracing: the whole surface is written down, holes are found again in any text, and the rest is refused clearly."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phloem.lang as pl
from phloem.errors import RequestError
from phloem.lang import ir
from phloem.lang.graph import Graph, Node
from phloem.lang.symbol import Marks, TraceError
from phloem.lang.tracer import Trace, TraceBranch

ROOT = Path(__file__).parents[2]


def kinds(graph: Graph, branch: int | None = None) -> list[str]:
    return [node.expr.kind for node in graph if branch is None or node.branch == branch]


def only(graph: Graph, kind: str) -> Node:
    (node,) = [node for node in graph if node.expr.kind == kind]
    return node


def texts(graph: Graph) -> list[str]:
    """Constants as they are, holes in braces."""
    shown = []
    for node in graph:
        if isinstance(node.expr, ir.Constant):
            shown.append(node.expr.text)
        elif isinstance(node.expr, (ir.Argument, ir.Variable)):
            shown.append(f"{{{node.expr.name}}}")
    return shown


@pl.function
def conversation(s: pl.State, topic: str, count: int = 2) -> Any:
    s += pl.system("Be brief.")
    s += pl.user(f"Tips on {topic}, please.")
    with s.assistant():
        forks = s.fork(count)
        for i, branch in enumerate(forks):
            branch += f"Tip {i}:" + pl.gen("tip", max_tokens=8, stop=["\n"])
        forks.join()
        s += "Both: " + " and ".join(s["tip"])
    with s.var_scope("verdict"):
        s += pl.select("best", choices=["first", "second"])
    s += s["verdict"]


def test_a_conversation() -> None:
    graph = conversation.trace()
    assert graph.arguments == ("topic",)
    assert kinds(graph, 0)[:4] == ["role_begin", "constant", "role_end", "role_begin"]
    assert texts(graph)[:4] == ["Be brief.", "Tips on ", "{topic}", ", please."]
    assert kinds(graph, 1) == kinds(graph, 2) == ["get_fork", "constant", "gen"]
    fork = only(graph, "fork")
    assert [node.before for node in graph if node.expr.kind == "get_fork"] == [fork, fork]
    gens = [node for node in graph if node.expr.kind == "gen"]
    tips = [node for node in graph if node.expr == ir.Variable("tip")]
    assert [node.reads for node in tips] == [(gens[0],), (gens[1],)]
    after = graph.branches()[0]
    assert after[after.index(fork) + 1].before is fork
    assert graph.nodes[-1].reads == (only(graph, "scope_end"),)
    assert only(graph, "select").expr == ir.Select(name="best", choices=("first", "second"))
    assert only(graph, "scope_begin").id < only(graph, "select").id < only(graph, "scope_end").id


def test_nodes_know_their_lines() -> None:
    source = Path(__file__).read_text().splitlines()
    for node in conversation.trace():
        name, line = node.line.split(":")
        assert name == "test_tracer.py"
        assert any(word in source[int(line) - 1] for word in ("s +=", "branch +=", "fork(", "with s"))


def test_a_program_is_traced_with_the_arguments_that_are_given() -> None:
    graph = conversation.trace(topic="bees", count=5)
    assert graph.arguments == ()
    assert len(graph.branches()) == 6
    assert conversation.bind(topic="bees").trace(count=1).arguments == ()
    with pytest.raises(RequestError, match=r"no argument 'topik' \(did you mean 'topic'"):
        conversation.trace(topik="bees")


def test_a_trace_is_the_same_each_time() -> None:
    assert str(conversation.trace()) == str(conversation.trace())
    assert conversation.trace().draw() == conversation.trace().draw()


@pytest.mark.parametrize(
    "write",
    [
        lambda q: f"<{q}>",
        lambda q: "<" + q + ">",
        lambda q: "<%s>" % q,  # noqa: UP031
        lambda q: "<{}>".format(q),  # noqa: UP032
        lambda q: "".join(["<", q, ">"]),
        lambda q: "<" + str(q) + ">",
        lambda q: ir.Constant("<") + q + ">",
        lambda q: pl.user_begin() + "<" + q + ">" + pl.user_end(),
    ],
)
def test_symbols_are_found_in_every_way_of_writing_text(write: Callable[[Any], Any]) -> None:
    @pl.function
    def program(s: pl.State, q: str) -> None:
        s += write(q)

    assert texts(program.trace()) == ["<", "{q}", ">"]


def test_symbols_survive_json_and_stay_apart() -> None:
    @pl.function
    def program(s: pl.State, a: str, b: str) -> None:
        s += json.dumps({"a": a, "b": [b, a]})

    assert texts(program.trace()) == ['{"a": "', "{a}", '", "b": ["', "{b}", '", "', "{a}", '"]}']


def test_texts_made_of_symbols_are_named_by_their_expression() -> None:
    names = ["{q['text']}", "{q.subject}", "{q[0]}", "{q[:10]}", "{repr(q)}", "{q:>9}", "{q.strip().upper()}"]

    @pl.function
    def program(s: pl.State, q: Any) -> None:
        s += q["text"] + q.subject + q[0] + q[:10] + f"{q!r}{q:>9}" + q.strip().upper()

    assert texts(program.trace()) == names


def test_holes_in_parameters_are_shown_and_read() -> None:
    @pl.function
    def program(s: pl.State, word: str) -> None:
        s += "x" + pl.gen("a", max_tokens=4, stop=[word, "."])
        s += pl.gen("b", regex=f"({word})+", max_tokens=4)
        s += pl.select("c", choices=["no", "yes, " + s["a"]])

    graph = program.trace()
    a, b = (node for node in graph if isinstance(node.expr, ir.Gen))
    choice = only(graph, "select")
    assert isinstance(a.expr, ir.Gen)
    assert isinstance(b.expr, ir.Gen)
    assert isinstance(choice.expr, ir.Select)
    assert a.expr.given["stop"] == ["{word}", "."]
    assert b.expr.given["regex"] == "({word})+"
    assert choice.expr.choices == ("no", "yes, {a}")
    assert choice.reads == (a,)


def test_separate_reasoning_sets_both_variables() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += pl.user("Why?")
        s += pl.assistant(pl.separate_reasoning("So: " + pl.gen("why"), model_type="qwen3"))
        s += s["why_reasoning_content"] + s["why"]

    graph = program.trace()
    node = only(graph, "separate_reasoning")
    assert node.reads == (only(graph, "gen"),)
    assert [one.reads for one in graph if one.expr.kind == "variable"] == [(node,), (node,)]
    assert "So: " in texts(graph)


def test_copies_and_nested_forks() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "a"
        with s.copy() as copied:
            copied += pl.gen("inner", n=2)
        outer = s.fork(2)
        for branch in outer:
            inner = branch.fork(2)
            inner += [pl.gen("x"), "y" + pl.gen("x")]
            inner.join("concate_and_append")
        outer.join()
        s += s["inner"][0][1]

    graph = program.trace()
    branches = graph.branches()
    assert len(branches) == 1 + 1 + 2 + 4
    parents = {branch: nodes[0].before.branch for branch, nodes in branches.items() if nodes[0].before}
    assert sorted(parents.values()) == [0, 0, 0, 2, 2, 3, 3]
    joins = [node for node in graph if node.expr.kind == "concat_and_append"]
    assert [len(node.reads) for node in joins] == [2, 2]
    assert all(one.branch != node.branch for node in joins for one in node.reads)
    assert graph.nodes[-1].expr == ir.Variable("inner[1]")
    assert texts(graph).count("y") == 2


def test_forks_are_dealt_and_called() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks += ["a", "b"]
        forks += "c"
        assert len(forks) == 2

    graph = program.trace()
    assert [[node.expr.text for node in graph.branches()[n] if isinstance(node.expr, ir.Constant)] for n in (1, 2)] == [
        ["0", "a", "c"],
        ["1", "b", "c"],
    ]


def test_text_and_messages_can_be_written_elsewhere() -> None:
    @pl.function
    def program(s: pl.State, q: str) -> None:
        s += pl.user("Q: " + q)
        s += pl.assistant(pl.gen("a"))
        other = s.fork(1)[0]
        other += "|" + s.messages()[0]["content"] + "|" + s.messages()[1]["content"] + "|"
        assert s.error() is None
        assert "a" in s
        s.sync()
        other += s.text()
        for piece in s.text_iter("a"):
            other += piece
        s.set_var("known", "k")
        other += s["known"]

    graph = program.trace()
    gen = only(graph, "gen")
    assert texts(graph)[2:7] == ["|Q: ", "{q}", "|", "{a}", "|"]
    assert texts(graph)[-2:] == ["{a}", "k"]
    assert "{role_begin(user)}" in texts(graph)  # what it is, a trace cannot know
    assert all(node.reads == (gen,) for node in graph if node.expr == ir.Variable("a"))


def test_commits_and_cancels_leave_the_graph_whole() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "a"
        s.commit()
        forks = s.fork(2)
        forks += pl.gen("x")
        forks[0].cancel()
        forks.join()
        s += s["x"][1]

    graph = program.trace()
    assert kinds(graph, 0) == ["constant", "commit_lazy", "fork", "variable"]
    assert graph.nodes[-1].reads[0].branch == 2


def test_reports_are_symbols_too() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "x" + pl.gen("a")
        s += s.get_meta_info("a")["finish_reason"]

    node = program.trace().nodes[-1]
    assert node.expr == ir.Variable("meta_info(a)['finish_reason']")


def test_async_bodies_are_traced_with_and_without_a_running_loop() -> None:
    @pl.function
    async def program(s: pl.State, q: str) -> None:
        s += q + pl.gen("a")
        await asyncio.sleep(0)
        s += await s.get("a") + await s.async_text()
        async for piece in s.text_async_iter("a"):
            s += piece
        assert await s.settled() is None

    async def inside() -> str:
        return str(program.trace())

    assert texts(program.trace()) == ["{q}", "{a}", "{q}", "{a}", "{a}"]
    assert asyncio.run(inside()) == str(program.trace())


def test_programs_within_programs() -> None:
    @pl.function
    def inner(s: pl.State, word: str) -> str:
        s += f"[{word}]" + pl.gen("x")
        return str(s["x"])

    @pl.function
    def outer(s: pl.State, q: str) -> None:
        s += "a"
        s += inner(s, word=q + "!")

    graph = outer.trace()
    assert texts(graph) == ["a", "[", "{q}", "!]", "{x}"]
    assert graph.nodes[-1].reads == (only(graph, "gen"),)


def test_a_run_inside_of_a_trace_is_refused() -> None:
    @pl.function
    def inner(s: pl.State, word: str) -> None:
        s += word

    @pl.function
    def outer(s: pl.State, q: str) -> None:
        inner.run(q)

    @pl.function
    def many(s: pl.State, q: str) -> None:
        inner.run_batch([{"word": q}])

    for program in (outer, many):
        with pytest.raises(TraceError, match=r"its body runs the program inner\n.*test_tracer.py:\d+: inner.run"):
            program.trace()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda s, q: "a" if q else "b", "a branch"),
        (lambda s, q: "a" if q == "x" else "b", "a comparison"),
        (lambda s, q: "a" if "x" in q else "b", "`in`"),
        (lambda s, q: "a" if q.strip().startswith("x") else "b", r"\.startswith\(\)"),
        (lambda s, q: "".join(one for one in q), "a loop"),
        (lambda s, q: int(q), r"int\(\)"),
        (lambda s, q: float(q), r"float\(\)"),
        (lambda s, q: len(q), r"len\(\)"),
        (lambda s, q: list(range(q)), "use as a number"),
        (lambda s, q: {"a": 1}[q], "a look-up"),
        (lambda s, q: q * 2, "arithmetic"),
        (lambda s, q: 1 + q, "arithmetic"),
        (lambda s, q: q - 1, "arithmetic"),
        (lambda s, q: json.loads(q), r"\.startswith\(\)"),
        (lambda s, q: q.items(), "a call"),
        (lambda s, q: s.fork(q), "a whole number of branches"),
        (lambda s, q: pl.gen("a", max_tokens=q), "max_tokens must be an integer"),
        (lambda s, q: s.__iadd__(pl.gen(q)), "a variable's name"),
        (lambda s, q: Path(q).read_text(), "No such file"),
    ],
)
def test_what_needs_a_value_is_refused_by_name_and_line(action: Callable[[Any, Any], Any], words: str) -> None:
    @pl.function
    def of_argument(s: pl.State, question: str, other: str) -> None:
        action(s, question)

    @pl.function
    def of_variable(s: pl.State) -> None:
        s += "x" + pl.gen("thought")
        action(s, s["thought"])

    with pytest.raises(TraceError, match=words) as argument:
        of_argument.trace()
    assert "tracing of_argument" in argument.value.message
    assert "argument 'question'" in argument.value.message
    assert "other" not in str(argument.value)
    assert f"{__file__}:" in argument.value.message
    assert argument.value.hint is not None
    assert "trace(question=...)" in argument.value.hint
    with pytest.raises(TraceError, match=words) as variable:
        of_variable.trace()
    assert "variable 'thought'" in variable.value.message
    assert variable.value.hint is not None
    assert "avoid" in variable.value.hint


def test_an_error_that_hides_the_value_still_tells_what_to_give() -> None:
    @pl.function
    def program(s: pl.State, options: list[str]) -> None:
        s += pl.select("x", choices=options)

    with pytest.raises(TraceError, match="choices must be a list") as caught:
        program.trace()
    assert caught.value.hint is not None
    assert "trace(options=...)" in caught.value.hint


def test_a_swallowed_failure_is_raised_in_the_end() -> None:
    @pl.function
    def program(s: pl.State, q: str) -> None:
        try:
            s += "a" if q else "b"
        except Exception:
            s += "c"

    with pytest.raises(TraceError, match="a branch needs the value of the argument 'q'"):
        program.trace()


def test_errors_of_the_program_itself_pass_through() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += "x"
        raise OSError("mine")

    @pl.function
    def nested(s: pl.State) -> None:
        s += pl.user("a" + pl.assistant("b"))

    with pytest.raises(OSError, match="mine"):
        program.trace()
    with pytest.raises(RequestError, match="assistant message begins inside a user message"):
        nested.trace()


def test_a_variable_that_nothing_sets() -> None:
    @pl.function
    def program(s: pl.State) -> None:
        s += pl.gen("a")
        s += s["b"]

    with pytest.raises(KeyError, match=r"'b': nothing before this sets .*\(set are: a\)"):
        program.trace()


EXAMPLES = sorted(path.stem for path in (ROOT / "examples" / "lang").glob("[!_]*.py"))
NUMBERS = {"steps": 2, "chains": 3, "depth": 2, "branches": 2, "keep": 1, "passages": 2, "count": 2}
DECIDED = {"react": "the variable 'tool'", "tree": "the variable 'mark'"}  # what the bodies of these look at


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_traced_and_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers given; a body that looks at what a model wrote is refused."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lang"))
    found = [one for one in vars(importlib.import_module(name)).values() if isinstance(one, pl.Program)]
    assert found
    for program in found:
        given = {argument: NUMBERS[argument] for argument in program.arg_names if argument in NUMBERS}
        if program.__name__ in DECIDED:
            with pytest.raises(TraceError, match=rf"{DECIDED[program.__name__]}(.|\n)*{name}\.py:"):
                program.trace(**given)
            continue
        graph = program.trace(**given)
        assert "gen" in kinds(graph) or "select" in kinds(graph)
        assert len(ElementTree.fromstring(graph.draw())) > len(graph)
        assert graph.draw(format="mermaid").count("-->") == sum(node.before is not None for node in graph)


class Format:
    """Says what roles add, as a backend's path does."""

    def append(self, text: str) -> None:
        pass

    def begin(self, role: str) -> str:
        return f"<{role}>"

    def end(self, role: str) -> str:
        return "</>"


def test_the_prefix_is_what_every_run_begins_with() -> None:
    @pl.function
    def plain(s: pl.State, q: str) -> None:
        s += "Answer shortly.\n"
        s += f"Q: {q}\nA:" + pl.gen("a")

    assert plain.trace().prefix() == "Answer shortly.\nQ: "
    assert plain.trace(q="Why?").prefix() == "Answer shortly.\nQ: Why?\nA:"
    assert conversation.trace().prefix() == ""
    assert conversation.trace().prefix(Format()) == "<system>Be brief.</><user>Tips on "  # type: ignore[arg-type]
    shown = [type(node.expr).__name__ for node in conversation.trace().prefix_nodes()]
    assert shown == ["RoleBegin", "Constant", "RoleEnd", "RoleBegin", "Constant"]


def test_the_tracer_offers_all_that_a_state_uses() -> None:
    tree = ast.parse((ROOT / "lang" / "state.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Attribute) and node.value.attr == "branch")
            or (isinstance(node.value, ast.Name) and node.value.id in ("branch", "source"))
        )
    }
    assert {"submit", "fork", "variable", "gather"} <= used
    branch = TraceBranch(Trace(Graph("x", ()), Marks("x")))
    assert not [name for name in used if not hasattr(branch, name)]
