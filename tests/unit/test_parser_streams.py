"""Parsers as streams: every cutting of any text, what is released when, and the time that long answers take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.interfaces import Piece, PluginContext, Tool
from phloem.plugins.parser._source import Markers, Source
from phloem.registry import Registry
from phloem.testing.parser import joined, read

NAMES = ("deepseek", "gemma", "generic", "harmony", "hermes", "llama3", "mistral", "pythonic", "think")
TOOLS = (Tool("f", parameters={"type": "object"}), Tool("g"))


def parser(name: str, **options: Any) -> Any:
    """A built-in parser by its name in the configuration."""
    cls = Registry().load("parser", name)
    return cls(cls.Options(**options), PluginContext("parser", name))


def fragments(name: str) -> list[str]:
    """What texts of a format are made of, whole and broken."""
    form = parser(name).format
    found = ["f", "g", " ", "\n", ",", ";", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ":", "=", "<", "x y", "é世"]
    found += ["{}", '{"a": "}\\""}', "a=1", "b='x'", "null", "1.50", '"name": ', '"arguments": ', '{"name": "f", ']
    found += [word for pair in [form.think or ()] for word in pair]
    for each in form.forms:
        before, after = each.body.around("f")
        found += [each.begin, each.opening, before, after, each.closing, each.separator, each.end, each.stop]
        found.append(each.text([("f", '{"a": [1, "x"]}')]))
    if name == "harmony":
        found += ["<|start|>assistant", "<|channel|>final<|message|>", " to=functions.g", "<|return|>", "<|message|>"]
    return [text for text in found if text]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_cutting_of_any_text_reads_the_same(name: str, data: st.DataObject) -> None:
    """what-breaks 52: streamed, a text is what it is as a whole, whatever it is and however it is cut."""
    pieces = data.draw(st.lists(st.sampled_from(fragments(name)), max_size=10))
    text = "".join(pieces)
    tools = [Tool(tool.name, strict=data.draw(st.booleans())) for tool in TOOLS]
    one = parser(name)
    prompt = data.draw(st.sampled_from(["", "".join(one.think or ("",))[: len((one.think or ("",))[0])]]))
    whole = read(one, [text], tools, prompt)
    assert read(one, list(text), tools, prompt) == whole
    assert read(one, pieces, tools, prompt) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(one, [text[:cut], "", text[cut:]], tools, prompt) == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_without_tools_all_is_content(name: str, data: st.DataObject) -> None:
    """Nothing is lost or added: white space around a thought, and harmony's headers, are the only exceptions."""
    text = "x" + "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=8)))
    if name != "harmony":
        assert read(parser(name), list(text), ()) == [Piece("content", text)]


def shown(name: str, text: str, **kwargs: Any) -> list[list[tuple[str, str]]]:
    """(kind, text) of the pieces that each character releases, and at the end."""
    stream = parser(name).stream(TOOLS, **kwargs)
    steps: list[Sequence[Piece]] = [stream.push(char) for char in text]
    return [[(piece.kind, piece.text) for piece in step] for step in [*steps, stream.finish()]]


@pytest.mark.parametrize("name", NAMES)
def test_content_is_not_held_back(name: str) -> None:
    """Each character of plain text comes at once."""
    start = "<|channel|>final<|message|>" if name == "harmony" else ""
    text = "Hello, you: it is 7."
    assert shown(name, start + text)[len(start) : -1] == [[("content", char)] for char in text]


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    text = "a <tool b <tool_call> c"
    released = ["".join(piece for _, piece in step) for step in shown("hermes", text)]
    assert released[:8] == ["a", " ", "", "", "", "", "", "<tool "]
    assert released[8:10] == ["b", " "]
    assert "".join(released) == text


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
        ("generic", '{"name": "f", "arguments": '),
    ],
)
def test_arguments_come_as_they_are_written(name: str, before: str) -> None:
    """The name with the first character of the arguments, then each character with itself."""
    arguments = '{"a": [1.50, "x{é"], "b": null}'
    steps = shown(name, before + arguments)
    assert not any(steps[: len(before)])
    assert steps[len(before)] == [("call", "f"), ("arguments", "{")]
    assert steps[len(before) + 1 : -1] == [[("arguments", char)] for char in arguments[1:]]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("pythonic", "[f(a='xy', b=1.5, c=[True", ['{"a": "x', "y", '"', ', "b": 1.5', ', "c": [', "true"]),
        ("gemma", '<|tool_call>call:f{a:<|"|>xy<|"|>,b:1.5,', ["{", '"a": ', '"', "x", "y", '"', ', "b": ', "1.5"]),
    ],
)
def test_other_notations_come_word_by_word(name: str, text: str, parts: list[str]) -> None:
    """Characters of a string at once, numbers and constants when they have ended, keys with their values."""
    pieces = [text for step in shown(name, text) for kind, text in step if kind == "arguments"]
    assert "".join(pieces) == "".join(parts)
    assert pieces == parts


def test_reasoning_streams_but_for_its_last_white_space() -> None:
    steps = shown("think", "<think>a b\n</think>c")
    assert [step for step in steps if step] == [[("reasoning", "a")], [("reasoning", " b")], [("content", "c")]]


@pytest.mark.parametrize(
    ("name", "make", "whole"),
    [
        ("hermes", lambda size: '<tool_call>\n{"name": "f", "arguments": {"a": "' + 'x{\\"' * (size // 4), False),
        ("hermes", lambda size: '<tool_call>\n{"arguments": {"a": "' + "<tool_call>" * (size // 11), False),
        ("generic", lambda size: '{"name": {[<' * (size // 12), True),
        ("pythonic", lambda size: "[f(a=[" + "'x', " * (size // 5), True),
    ],
)
def test_long_answers_take_linear_time(name: str, make: Any, whole: bool) -> None:
    """200,000 characters, one at a time or at once, beside 50,000."""

    def seconds(size: int) -> float:
        stream, text = parser(name).stream(TOOLS), make(size)
        began = time.thread_time()
        for part in [text] if whole else text:
            stream.push(part)
        stream.finish()
        return time.thread_time() - began

    ratios = (seconds(200_000) / max(seconds(50_000), 0.001) for _ in range(3))
    assert any(ratio < 8 for ratio in ratios)  # other work on the machine may slow one


def test_markers_that_may_have_begun() -> None:
    markers = Markers(["<a>", "<ab", "[x]"])
    assert [markers.begun(text) for text in ("", "<", "x<a", "<b", "[", "<a>")] == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_no_marker_is_part_of_another(name: str) -> None:
    """Else which one is found first would depend on the cuts."""
    for markers in (parser(name).format.markers.texts, (parser(name).format.think or ("",))[1:]):
        assert not [(a, b) for a in markers for b in markers if a != b and a in b]


def test_a_source_reads_again_what_it_kept() -> None:
    source = Source()
    source.add("abc")
    source.take(1)
    source.keep()
    source.take(1)
    source.add("de")
    source.take(2)
    assert source.kept() == "bcd"
    assert source.rewind() == 3
    assert source.take(4) == "bcde"
    assert source.forget() == "bcde"
    assert source.kept() == ""


def test_two_streams_of_a_parser_are_independent() -> None:
    one = parser("hermes")
    first, second = one.stream(TOOLS), one.stream(TOOLS)
    call = one.call_text([("f", '{"a": 1}')])
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for char in call:
        pieces[0].extend(first.push(char))
        pieces[1].extend(second.push(char))
    assert joined(pieces[0]) == joined(pieces[1]) == [Piece("call", "f", 0), Piece("arguments", '{"a": 1}', 0)]
