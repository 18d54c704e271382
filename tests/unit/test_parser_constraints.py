"""A format is defined once: what it writes, its constraint accepts and its stream reads back, for any tools."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_rig import backend, takes

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Tool
from phloem.plugins.api._chat_call import _content_or_calls
from phloem.plugins.api._constraint import Given
from phloem.plugins.api._tools import Toolset
from phloem.plugins.grammar import _tags
from phloem.registry import Registry
from phloem.testing.parser import acceptor, calls_of, read, text_of

NAMES = ("deepseek", "gemma", "generic", "harmony", "hermes", "llama3", "mistral", "pythonic")
TEXTS = (
    "",
    "a b",
    'q"uo\\te',
    "{}[]()",
    "é世😀",
    "</tool_call>",
    "<think>",
    "line\nbreak\t",
    "it's",
    "[TOOL_CALLS]",
    "12",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    *({"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}),
    {"enum": ["x", "y z", 3]},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": {"q": {"type": "string"}, "r": {"$ref": "#/$defs/point"}}, "required": ["q"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["integer", "null"]},
)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def parser(name: str) -> Any:
    """A built-in parser by its name in the configuration."""
    cls = Registry().load("parser", name)
    return cls(cls.Options(), PluginContext("parser", name))


def random_tool(rng: random.Random, place: int, *, strict: bool) -> Tool:
    """A tool of up to three arguments, some of them optional."""
    properties = {f"p{i}": rng.choice(SCHEMAS) for i in range(rng.randint(0, 3))}
    required = [name for name in properties if rng.random() < 0.6]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(f"tool_{place}", "", {**schema, "$defs": {"point": POINT}}, strict)


def random_value(rng: random.Random, schema: dict[str, Any]) -> Any:
    """A value that satisfies one of SCHEMAS."""
    if "$ref" in schema:
        return random_value(rng, POINT)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return random_value(rng, rng.choice(schema["anyOf"]))
    kind = schema["type"] if isinstance(schema["type"], str) else rng.choice(schema["type"])
    if kind == "array":
        return [random_value(rng, schema["items"]) for _ in range(rng.randint(0, 2))]
    if kind == "object":
        members = schema["properties"].items()
        return {n: random_value(rng, s) for n, s in members if n in schema["required"] or rng.random() < 0.5}
    simple = {"string": rng.choice(TEXTS), "integer": rng.randint(-9, 99), "number": rng.choice([1.5, -2, 0.001])}
    return simple.get(kind, None if kind == "null" else rng.random() < 0.5)


def random_call(rng: random.Random, tool: Tool) -> tuple[str, str]:
    """A call of a tool, required arguments first: an order that no notation refuses."""
    required, members = tool.parameters["required"], tool.parameters["properties"]
    chosen = [n for n in members if n in required] + [n for n in members if n not in required and rng.random() < 0.5]
    if any(n not in required for n in chosen):
        chosen.sort(key=lambda name: (name not in required, name))
    arguments = {name: random_value(rng, members[name]) for name in chosen}
    return tool.name, json.dumps(arguments, ensure_ascii=False)


def in_schema_order(call: tuple[str, str], tool: Tool) -> tuple[str, str]:
    """JSON constraints want members in the order of the schema."""
    arguments = json.loads(call[1])
    ordered = {name: arguments[name] for name in tool.parameters["properties"] if name in arguments}
    return call[0], json.dumps(ordered, ensure_ascii=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", "tool_0", "auto"])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_written_accepted_and_read_back(name: str, choice: str, parallel: bool) -> None:
    """Random tools, random arguments, every form that the constraint lets a model write."""
    xgrammar = pytest.importorskip("xgrammar")
    one, rng = parser(name), random.Random(f"{name}{choice}{parallel}")
    for _ in range(4):
        tools = [random_tool(rng, i, strict=choice == "auto") for i in range(rng.randint(1, 3))]
        tag = one.constraint(tools, choice, parallel)
        assert _tags.parse(json.dumps(tag)), "every backend takes the tree, or says why it does not"
        accepts = acceptor(xgrammar, tag)
        many = parallel and choice in ("required", "auto") and not one.format.single
        called = [
            tools[0] if choice == "tool_0" else rng.choice(tools) for _ in range(rng.randint(1, 3) if many else 1)
        ]
        calls = [random_call(rng, tool) for tool in called]
        if name not in ("pythonic", "gemma"):
            calls = [in_schema_order(call, tool) for call, tool in zip(calls, called, strict=True)]
        for form in one.format.forms:
            if form.variant:
                continue
            text = form.text(calls)
            assert accepts(text), (text, tag)
            for parts in ([text], list(text)):
                pieces = read(one, parts, tools)
                assert calls_of(pieces) == [(tool, json.loads(arguments)) for tool, arguments in calls]
                assert not text_of(pieces)
                if name not in ("pythonic", "gemma"):
                    written = [piece.text for piece in pieces if piece.kind == "arguments"]
                    assert written == [arguments for _, arguments in calls], "verbatim"
            if not many:
                assert not accepts(form.text(calls * 2))
        for text in ("", "Yes.", "Yes, {1: [2]} (3)."):
            assert accepts(text) == (choice == "auto")


TOOL = Tool(
    "f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True
)
LOOSE = Tool("g", parameters={"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]})


@pytest.mark.parametrize("name", NAMES)
def test_only_strict_tools_are_held_to_their_schema_where_text_is_free(name: str) -> None:
    """Notations without a free form of arguments hold every tool to its schema."""
    one = parser(name)
    accepts = acceptor(pytest.importorskip("xgrammar"), one.constraint([TOOL, LOOSE], "auto", True))
    form = one.format.forms[0]
    assert accepts("So: " + form.text([("f", '{"a": 1}')]))
    assert not accepts("So: " + form.text([("f", '{"a": "x"}')]))
    assert not accepts("So: " + form.text([("f", "{}")]))
    assert accepts("So: " + form.text([("g", '{"b": 1}')]))
    assert accepts("So: " + form.text([("g", '{"b": "x"}')])) == form.body.syntax.free
    other = form.text([("h", "{}")])
    if name == "pythonic":  # its names are what triggers: the call of another is text, and read as such
        assert [piece.kind for piece in read(one, [other], [TOOL, LOOSE])] == ["content"]
    else:
        assert not accepts("So: " + other)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_that_tool_once(name: str) -> None:
    one = parser(name)
    with pytest.raises(RequestError, match="there is no tool named 'h'") as error:
        one.constraint([TOOL, LOOSE], "h", True)
    assert error.value.param == "tool_choice"
    accepts = acceptor(pytest.importorskip("xgrammar"), one.constraint([TOOL, LOOSE], "g", True))
    assert accepts(one.call_text([("g", '{"b": 1}')]))
    assert not accepts(one.call_text([("f", '{"a": 1}')]))
    assert not accepts(one.call_text([("g", '{"b": 1}')] * 2))


def test_both_forms_of_a_format_may_be_written() -> None:
    """The model's own habit decides which."""
    xgrammar = pytest.importorskip("xgrammar")
    accepts = acceptor(xgrammar, parser("mistral").constraint([TOOL], "required", True))
    call = '{"name": "f", "arguments": {"a": 1}}'
    for text in (f"[TOOL_CALLS][{call}, {call}]", f"[TOOL_CALLS] [{call}]", '[TOOL_CALLS]f[ARGS]{"a": 1}'):
        assert accepts(text)
    accepts = acceptor(xgrammar, parser("harmony").constraint([TOOL], "auto", True))
    heads = (
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
    )
    for head in heads:
        assert accepts(f'{head}<|message|>{{"a": 1}}')
        assert not accepts(f'{head}<|message|>{{"a": "x"}}')


def test_optional_arguments_of_a_python_call_in_every_combination() -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    accepts = acceptor(
        pytest.importorskip("xgrammar"),
        parser("pythonic").constraint([Tool("f", parameters={"type": "object", "properties": properties})], "f", False),
    )
    for chosen in range(8):
        names = [name for i, name in enumerate("abc") if chosen >> i & 1]
        assert accepts(f"[f({', '.join(f'{name}=1' for name in names)})]")
    for text in ("[f(b=1, a=1)]", "[f(a=1, a=1)]", "[f(, a=1)]", "[f(a=1,)]", "[f(d=1)]", "[f(a=x)]"):
        assert not accepts(text)


@pytest.mark.parametrize("name", NAMES)
def test_content_with_a_format_stands_beside_calls(name: str) -> None:
    """What the chat route asks for where `response_format` and tools are given: xgrammar holds the answer to it."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    given = Given("response_format", "json_schema", schema)
    for strict in (False, True):
        tool = Tool("f", "", {**schema, "additionalProperties": False}, strict)
        both = _content_or_calls(given, Toolset((tool,)), parser(name), None)
        constraint = Constraint(kind="structural_tag", value=json.dumps(both.value))
        grammar = backend("xgrammar")
        assert grammar.unenforced(constraint) == []
        start = grammar.matcher(constraint, grammar.compile(constraint))
        call = parser(name).format.forms[0].text([("f", '{"ok": true}')])
        for text, taken in (
            ('{"ok": true}', True),
            (call, True),
            ("text", False),
            (f'{{"ok": true}}{call}', False),
            (call.replace("ok", "no").replace("f", "g", 1), False),
        ):
            assert takes(start, text.encode()) == taken, text
