"""Conformance of kind `parser`: a stream is the whole text however it is cut, and what constrains is what is read.

class TestMine(ParserSuite):
    plugin = MyParser
    texts = ("an answer in my format",)
    templates = ("{{ a chat template of my format }}",)
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from ..errors import RequestError
from ..interfaces import Parser, Piece, PluginContext, Tool
from .plugin import PluginSuite

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", "The time.", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
# Arguments that have gone wrong somewhere: quotes, brackets and markers in strings, types, nothing at all.
ARGUMENTS = (
    {"city": "Oslo", "days": 3},
    {"city": 'a "quoted" \\ name', "exact": True},
    {"city": "}] ) '){{ </tool_call>", "tags": ["x", ""]},
    {"city": "Tromsø 世界 🌍", "days": -1, "exact": False, "tags": []},
    {"city": "<think>line\nbreak\t</think>"},
    {"city": "12"},
)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind and call made one: what a text is, whatever the cuts."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind != "call" and found[-1][::2] == piece[::2]:
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def read(parser: Parser, parts: Sequence[str], tools: Sequence[Tool] = TOOLS, prompt: str = "") -> list[Piece]:
    """An answer that comes in parts, joined."""
    stream = parser.stream(tools, prompt)
    return joined([piece for part in parts for piece in stream.push(part)] + stream.finish())


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, Any]]:
    """Names and arguments, as values."""
    names = {piece.call: piece.text for piece in pieces if piece.kind == "call"}
    texts = {piece.call: piece.text for piece in pieces if piece.kind == "arguments"}
    return [(name, json.loads(texts[call])) for call, name in sorted(names.items())]


def text_of(pieces: Sequence[Piece], kind: str = "content") -> str:
    """All of one kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


class FakeParser:
    """`<call>{"name": ..., "arguments": {...}}</call>`, each given whole: for tests of what uses a parser."""

    api = 1
    capabilities: frozenset[str] = frozenset({"tools"})
    special = False
    think: tuple[str, str] | None = None

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the marker."""
        return "<call>" in template

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> FakeStream:
        """One answer."""
        return FakeStream(tools)

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """Nothing but calls, unless the choice is `auto`."""
        named = [tool for tool in tools if choice in ("required", tool.name)]
        if choice == "auto" or not named:
            return None
        tags = [
            {"type": "tag", "begin": before, "content": {"type": "json_schema", "json_schema": tool.parameters}}
            | {"end": "}</call>"}
            for tool in named
            for before in [f'<call>{{"name": {json.dumps(tool.name)}, "arguments": ']
        ]
        one = {"type": "or", "elements": tags}
        many = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}
        return {"type": "structural_tag", "format": many if parallel and choice == "required" else one}

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Names and schemas."""
        return "\n".join(f"{tool.name}: {json.dumps(tool.parameters)}" for tool in tools)

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """As `stream` reads it."""
        return "".join(f'<call>{{"name": {json.dumps(name)}, "arguments": {text}}}</call>' for name, text in calls)

    def result_text(self, name: str, content: str) -> str:
        """The content."""
        return content


class FakeStream:
    """Holds a call until it is complete. Gives what is no call as content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools, self._calls = tools, 0
        self._held: list[str] = []  # a call from its beginning, or what may begin one
        self._tail = ""  # of a call, in which its end may have begun

    def push(self, text: str) -> list[Piece]:
        """Everything before a call that has not ended, or what may begin one."""
        self._held.append(text)
        if self._tail:
            self._tail += text
            if "</call>" not in self._tail:
                self._tail = self._tail[-len("</call>") :]
                return []
        text, self._held, self._tail = "".join(self._held), [], ""
        pieces: list[Piece] = []
        while self._tools and (begin := text.find("<call>")) >= 0:
            pieces += [Piece("content", text[:begin])] if begin else []
            call, end, text = text[begin:].partition("</call>")
            if not end:
                self._held, self._tail = [call], call[-len("</call>") :]
                return pieces
            pieces += self._call(call)
        size = next((n for n in range(5, 0, -1) if self._tools and "<call>".startswith(text[-n:])), 0)
        free = text[: len(text) - min(size, len(text))]
        self._held = [text[len(free) :]]
        return pieces + ([Piece("content", free)] if free else [])

    def finish(self) -> list[Piece]:
        """What is left."""
        text = "".join(self._held)
        return [Piece("content", text)] if text else []

    def _call(self, text: str) -> list[Piece]:
        """A call without its end."""
        try:
            record = json.loads(text[len("<call>") :])
            name, arguments = record["name"], json.dumps(record["arguments"])
        except (ValueError, LookupError, TypeError):
            return [Piece("content", f"{text}</call>")]
        self._calls += 1
        return [Piece("call", name, self._calls - 1), Piece("arguments", arguments, self._calls - 1)]


class ParserSuite(PluginSuite):
    """Set `texts` to answers in the format, broken ones too, and `templates` to chat templates that are of it."""

    kind = "parser"
    texts: ClassVar[tuple[str, ...]] = ()
    templates: ClassVar[tuple[str, ...]] = ()

    def parser(self) -> Parser:
        """`make`, typed."""
        parser: Parser = self.make()
        return parser

    def answers(self) -> list[str]:
        """Answers of all sorts: thoughts, texts, calls, calls cut off and calls broken in the middle."""
        parser = self.parser()
        found = [*self.texts, "", " \n", "A plain answer, of {1, 2} and [3].\n\n", '< {"name": null} [f(] ]] }']
        if "tools" in parser.capabilities:
            one, two = (self.written(parser, *calls) for calls in ([ARGUMENTS[2]], ARGUMENTS[:2]))
            found += [one, f"Let me see.\n{two}", f"{one}\nDone.", f"{one} and\n{two}\n"]
            found += [two[: len(two) * part // 7] for part in range(1, 7)]
            found += [two[: len(two) // 3] + two[len(two) // 2 :], one.replace(":", "", 1), one.replace('"', "", 1)]
        if parser.think is not None:
            begin, end = parser.think
            found += [f"{begin}\nI think.\n{end}\n\n{text}" for text in ("Yes.", found[-1])]
            found += [f"{begin}I think. </thi", f"No thought.{end} More.", f"Late {begin} thought{end}."]
        return found

    def written(self, parser: Parser, *arguments: dict[str, Any]) -> str:
        """Calls of the first tool, as the parser writes them."""
        return parser.call_text([(WEATHER.name, json.dumps(value, ensure_ascii=False)) for value in arguments])

    def needs(self, capability: str) -> Parser:
        """The parser, if it has a capability."""
        parser = self.parser()
        if capability not in parser.capabilities:
            pytest.skip(f"the parser has no capability {capability}")
        return parser

    def test_a_stream_is_the_whole_text_however_it_is_cut(self) -> None:
        """One character at a time, in two parts everywhere, and in random parts."""
        parser, rng = self.parser(), random.Random(0)
        for answer in self.answers():
            for tools in (TOOLS, ()):
                whole = read(parser, [answer], tools)
                cuts = [[answer[:at], answer[at:]] for at in range(len(answer) + 1)]
                for _ in range(10):
                    places = sorted(rng.sample(range(len(answer) + 1), min(len(answer), rng.randint(2, 9))))
                    cuts.append([answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)])
                for parts in [list(answer), *cuts]:
                    assert read(parser, parts, tools) == whole, f"{parts!r} is not read as its whole"

    def test_pieces_are_in_order(self) -> None:
        """Calls are numbered from 0, each before its arguments; nothing is given that has no text."""
        parser = self.parser()
        for answer in self.answers():
            calls = 0
            for piece in read(parser, list(answer)):
                assert piece.kind in ("content", "reasoning", "call", "arguments")
                assert piece.text, f"an empty piece of {answer!r}"
                if piece.kind == "call":
                    assert piece.call == calls, "calls are numbered as they come"
                    calls += 1
                elif piece.kind == "arguments":
                    assert piece.call == calls - 1, "arguments belong to the latest call"

    def test_text_is_content_as_it_stands(self) -> None:
        """What is no call loses and gains nothing, with tools and without."""
        parser = self.parser()
        for text in ("", "x", "Hello <b>you</b>.\n", " two  spaces ", 'if (a < b) { return [1, {"k": "v"}]; }\n'):
            assert read(parser, [text]) == ([Piece("content", text)] if text else [])
            assert read(parser, [text], ()) == read(parser, [text])

    def test_calls_are_read_as_they_are_written(self) -> None:
        """`call_text` and `stream` are of one format: names and values come back, the text before them stays."""
        parser = self.needs("tools")
        for value in ARGUMENTS:
            pieces = read(parser, ["Let me see.\n", self.written(parser, value)])
            assert calls_of(pieces) == [(WEATHER.name, value)]
            assert text_of(pieces) == "Let me see.\n"
        written = parser.call_text([(CLOCK.name, "{}"), (WEATHER.name, '{"city": "Oslo"}')])
        assert calls_of(read(parser, [written])) == [(CLOCK.name, {}), (WEATHER.name, {"city": "Oslo"})]

    def test_a_call_cut_off_is_not_lost(self) -> None:
        """Wherever an answer ends, what came of a call is content, or a call as far as it came."""
        parser = self.needs("tools")
        written = self.written(parser, ARGUMENTS[0])
        for size in range(len(written) - 2, 0, -1):
            pieces = read(parser, [written[:size]])
            if not any(piece.kind == "call" for piece in pieces):
                assert text_of(pieces).strip() == written[:size].strip()

    def test_thoughts(self) -> None:
        """Between their marks; from the start where the prompt has opened one; to the end where none closes it."""
        parser = self.needs("reasoning")
        assert parser.think is not None
        begin, end = parser.think
        for parts in ([f"{begin}\nHm.\n{end}\n\nYes."], list(f"{begin}Hm.{end}\n")):
            assert text_of(read(parser, parts), "reasoning").strip() == "Hm."
        assert read(parser, [f"Hm {{}}.{end}"], prompt=f"...{begin}\n") == [Piece("reasoning", "Hm {}.")]
        for prompt, answer in (("", f"{begin}Hm."), (f"...{begin}", "Hm.")):
            assert read(parser, list(answer), prompt=prompt) == [Piece("reasoning", "Hm.")]

    def test_constraints_hold_what_is_read(self) -> None:
        """What `call_text` writes is accepted; text, other tools, and more calls than allowed are not."""
        parser = self.needs("tools")
        xgrammar = pytest.importorskip("xgrammar")
        one = self.written(parser, ARGUMENTS[1])
        other = parser.call_text([(CLOCK.name, "{}")])
        for choice in ("required", WEATHER.name):
            for parallel in (True, False):
                tag = parser.constraint(TOOLS, choice, parallel)
                assert tag is not None
                assert tag["type"] == "structural_tag"
                accepts = acceptor(xgrammar, tag)
                assert accepts(one), f"{choice}: {one!r} is refused by {json.dumps(tag)}"
                assert accepts(other) == (choice == "required")
                refused = ["", "Yes.", one[:-1] + "~", f"Yes. {one}", one.replace(WEATHER.name, "delete")]
                if not parallel or choice != "required":
                    refused.append(self.written(parser, ARGUMENTS[1], ARGUMENTS[1]))
                for text in refused:
                    assert not accepts(text), f"{choice}: {text!r} is accepted"

    def test_auto_is_free_without_strict_tools(self) -> None:
        """And with them a text may hold calls, and need not."""
        parser = self.needs("tools")
        assert parser.constraint(TOOLS, "auto", True) is None
        assert parser.constraint((), "auto", True) is None
        strict = [Tool(tool.name, tool.description, tool.parameters, strict=True) for tool in TOOLS]
        tag = parser.constraint(strict, "auto", True)
        if tag is None:
            pytest.skip("the parser does not constrain calls of strict tools")
        accepts = acceptor(pytest.importorskip("xgrammar"), tag)
        for text in ("Yes.", self.written(parser, ARGUMENTS[1])):
            assert accepts(text)
        assert not accepts(self.written(parser, {"city": "Oslo"}).replace("city", "town"))

    def test_a_model_is_told_of_its_tools(self) -> None:
        """The instructions name tools and arguments; a result is shown as it stands."""
        parser = self.needs("tools")
        for parallel in (True, False):
            text = parser.instructions(TOOLS, parallel)
            assert all(word in text for word in (WEATHER.name, CLOCK.name, "city", "integer"))
        assert "22 degrees" in parser.result_text(WEATHER.name, "22 degrees")

    def test_a_tool_that_is_not_there_is_refused(self) -> None:
        """By None, or with a RequestError; a constraint to anything else would be a call nobody asked for."""
        parser, tag = self.needs("tools"), None
        with contextlib.suppress(RequestError):
            tag = parser.constraint(TOOLS, "no_such_tool", True)
        assert tag is None

    def test_templates_are_recognised(self) -> None:
        """`matches` is True for the format's templates, and False for one that knows nothing."""
        assert all(self.plugin.matches(template) for template in self.templates)
        assert self.plugin.matches("{{ tools }}{{ messages[0].content }}") is False

    def test_reading_is_linear(self) -> None:
        """Four times the text takes about four times as long, not sixteen, one character at a time."""
        parser = self.parser()
        for make in self._long_texts(parser):
            short, long = list(make(5_000)), list(make(20_000))
            ratios = (_seconds(parser, long) / max(_seconds(parser, short), 0.001) for _ in range(4))
            assert any(ratio < 8 for ratio in ratios), f"{make(40)!r} ..."  # other work on the machine may slow one

    def _long_texts(self, parser: Parser) -> list[Any]:
        found = [lambda size: "{[<" * (size // 3), lambda size: "a {b} <c>\n" * (size // 10)]
        if parser.think is not None:
            found.append(lambda size: parser.think[0] + "hm. " * (size // 4) if parser.think else "")
        if "tools" in parser.capabilities:
            found.append(lambda size: self.written(parser, {"city": "{<[\"'" * (size // 5)}))
            start = self.written(parser, {"city": "x"}).partition("x")[0]
            found += [lambda size: start * (size // len(start)), lambda size: start + "[{" * (size // 2)]
        return found


def acceptor(xgrammar: Any, tag: dict[str, Any]) -> Any:
    """A function that tells whether a structural tag accepts a text, by the library that defines them."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo([*vocabulary, b"</s>"], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(tag)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    return accepts


def _seconds(parser: Parser, parts: Sequence[str]) -> float:
    stream, began = parser.stream(TOOLS), time.thread_time()
    for part in parts:
        stream.push(part)
    stream.finish()
    return time.thread_time() - began
