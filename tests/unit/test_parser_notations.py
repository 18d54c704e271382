"""Arguments that are not JSON: Python's literals and Gemma's notation become JSON once, exactly."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.errors import RequestError
from phloem.interfaces import PluginContext, Tool
from phloem.plugins.parser._exact import json_word
from phloem.registry import Registry
from phloem.testing.parser import calls_of, read, text_of

TOOLS = (Tool("f"),)
LOOP = {"$ref": "#/$defs/a"}
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def parser(name: str) -> Any:
    """A built-in parser by its name in the configuration."""
    cls = Registry().load("parser", name)
    return cls(cls.Options(), PluginContext("parser", name))


def python(arguments: str) -> Any:
    """The arguments of a Python call, as they are read one character at a time; None if all of it is content."""
    text = f"[f({arguments})]"
    pieces = read(parser("pythonic"), list(text), TOOLS)
    if not any(piece.kind == "call" for piece in pieces):
        assert text_of(pieces) == text
        return None
    assert not text_of(pieces), pieces
    return calls_of(pieces)[0][1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arguments=st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), values, max_size=4))
def test_python_literals_have_pythons_meaning(arguments: dict[str, Any]) -> None:
    """`repr` writes every kind of literal; so does JSON, which the constraint asks for."""
    for write in (repr, lambda value: json.dumps(value, ensure_ascii=False), json.dumps):
        assert python(", ".join(f"{name}={write(value)}" for name, value in arguments.items())) == arguments


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize(
    "literal",
    [
        *("'it\\'s'", '"a\\"b"', "'tab\\tnul\\0 bell\\a vt\\v'", "'\\x41\\u00e9\\U0001F600\\N{DIGIT ONE}\\101\\7'"),
        *("'''three ' \"\" quotes'''", '"""a\nb"""', "''", '""', "'\\\nx'", "'no \\q \\d escape'", "'\\\\'"),
        *("[1, 'x', [], {}, {'a': [None]},]", "{'a': 1, \"b\": {'c': True},}", "[\n1 ,\n2\n]"),
        *("0", "-7", "1.50", "1e5", "1E+5", "-0.0", "1_000", ".5", "5.", "-.5e-3", "+5", "0x1F", "0o17", "0b101", "00"),
        *("True", "False", "None", "12345678901234567890123"),
    ],
)
def test_literals_that_repr_does_not_write(literal: str) -> None:
    value = ast.literal_eval(literal)
    assert python(f"a={literal}") == {"a": value}
    assert python(f" a = {literal} , b=1") == {"a": value, "b": 1}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        *(("1.50", "1.50"), ("1e400", "1e400"), ("-0", "-0"), ("1_0.0_1", "10.01"), ("5.", "5.0"), (".5", "0.5")),
        *(("+1e2", "1e2"), ("-0x10", "-16"), ("null", "null"), ("None", "null"), ("true", "true")),
        *(("007", None), ("1__0", None), ("_1", None), ("1j", None), ("x", None), ("", None), (".", None), ("-", None)),
        *(("nan", None), ("1e", None), ("0x", None), ("--1", None), ("1.2.3", None), ("e5", None)),
    ],
)
def test_digits_are_kept(word: str, text: str | None) -> None:
    """A number is rewritten only where JSON has no such spelling."""
    assert json_word(word) == text


@pytest.mark.parametrize(
    "arguments", ["x", "1", "a=x", "a=-x", "a=f()", "a='x", "a==1", "1a=2", "a=007", "a=b'x'", "=1", "*a"]
)
def test_what_is_no_call_with_literals_is_content(arguments: str) -> None:
    text = f"[f({arguments}"
    pieces = read(parser("pythonic"), list(text), TOOLS)
    if arguments == "a='x":  # it may still become one
        assert [piece[:2] for piece in pieces] == [("call", "f"), ("arguments", '{"a": "x')]
    else:
        assert [piece[:2] for piece in pieces] == [("content", text)]


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ("[f(a=1, b=x)]", '{"a": 1', ", b=x)]"),
        ("[f(a=1 + 2)]", '{"a": 1', " + 2)]"),
        ("[f(a={1: 2})]", '{"a": {', "1: 2})]"),
        ("[f(a=[1 2])]", '{"a": [1', " 2])]"),
        ("[f(a='x' 'y')]", '{"a": "x"', " 'y')]"),
    ],
)
def test_a_call_that_goes_wrong_keeps_what_it_had(text: str, arguments: str, rest: str) -> None:
    pieces = read(parser("pythonic"), list(text), TOOLS)
    assert [piece[:2] for piece in pieces] == [("call", "f"), ("arguments", arguments), ("content", rest)]


def test_deep_nesting_is_no_recursion() -> None:
    deep = "[" * 5000 + "]" * 5000
    for name, text in (("pythonic", f"[f(a={deep})]"), ("gemma", f"<|tool_call>call:f{{a:{deep}}}<tool_call|>")):
        pieces = read(parser(name), [text], TOOLS)
        assert [piece[:2] for piece in pieces] == [("call", "f"), ("arguments", f'{{"a": {deep}}}')]


gemma_text = st.text().filter(lambda text: "<escape>" not in text)
gemma_key = st.from_regex(r"[a-zA-Z0-9_]{1,6}", fullmatch=True)
gemma_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | gemma_text,
    lambda inner: st.lists(inner) | st.dictionaries(gemma_key, inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arguments=st.dictionaries(gemma_key, gemma_values, max_size=4))
def test_gemmas_notation_is_read_as_it_is_written(arguments: dict[str, Any]) -> None:
    one = parser("gemma")
    text = one.call_text([("f", json.dumps(arguments))])
    assert calls_of(read(one, list(text), TOOLS)) == [("f", arguments)]


@pytest.mark.parametrize(
    ("name", "schema", "what"),
    [
        ("pythonic", {"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ("pythonic", {"properties": {"not a name": {}}}, "the name 'not a name'"),
        ("gemma", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("gemma", {"properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}, "uniqueItems"),
        ("gemma", {"properties": {"a": {"type": "array", "items": {}, "minItems": 2}}}, "minItems 2"),
        ("gemma", {"properties": {"a": {"$ref": "#/nowhere"}}}, r"\$ref #/nowhere"),
        (
            "gemma",
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
            r"\$ref #/\$defs/a",
        ),
        ("gemma", {"properties": {"a,b": {}}}, "the name 'a,b'"),
        ("gemma", {"patternProperties": {}}, "patternProperties"),
    ],
)
def test_schemas_beyond_a_notation_are_refused(name: str, schema: dict[str, Any], what: str) -> None:
    tool = Tool("f", parameters={"type": "object"} | schema)
    with pytest.raises(RequestError, match=f"cannot enforce {what} in the parameters of tool f") as error:
        parser(name).constraint((tool,), "required", True)
    assert error.value.param == "tools"
    assert error.value.hint is not None
    assert parser(name).constraint((tool,), "auto", True) is None, "nothing is forced, so nothing is refused"


def test_parameters_must_be_an_object() -> None:
    with pytest.raises(RequestError, match="the parameters of tool f must be the schema of an object"):
        parser("hermes").constraint((Tool("f", parameters={"type": "array"}),), "required", True)
