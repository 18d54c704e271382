"""How one call is written: where its name stands, and in what syntax its arguments are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Protocol

from phloem.errors import RequestError

from ._json import LONGEST_NAME, ignore, pass_value, read_string, value_begins
from ._source import Source, Step
from ._tree import Node, Schema, leaf

_NAME = re.compile(r"[\w.:/-]")
_ARGUMENTS = ("arguments", "parameters")  # models take one key for the other
_OTHERS = ("type", "id")  # what models write beside


class Sink(Protocol):
    """Where a call goes. It begins with the first text of its arguments: until then it may turn out to be none.

    What is read after the last text that was written is the format's, or becomes content where the call breaks off.
    """

    def call(self, name: str) -> None:
        """The name is known."""

    def write(self, text: str) -> None:
        """More JSON text of the arguments."""


class Syntax(Protocol):
    """How arguments are written. `begin` and `end` stand around them."""

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def free(self) -> bool:
        """Any arguments can be written, without a schema that names them."""

    def tree(self, schema: Schema, tool: str) -> Node:
        """What may stand between `begin` and `end`. Raises RequestError(param="tools") for what it cannot express."""

    def spell(self, arguments: str, tool: str) -> str:
        """What stands there for arguments as JSON text. Raises RequestError(param="messages")."""

    def read(self, source: Source, sink: Sink, stop: str) -> Step[bool]:
        """Read them, with `begin` and `end`; False where they end unfinished, or are none. `stop` may cut them."""


class Body(Protocol):
    """A call between the markers of its format."""

    def around(self, name: str) -> tuple[str, str]:
        """The texts before and after the arguments."""

    @property
    def syntax(self) -> Syntax: ...

    def read(self, source: Source, sink: Sink, *, stop: str, plain: bool) -> Step[bool]:
        """Read one; False if it is none (the sink got nothing) or breaks off. `plain`: no marker says it is one."""


class Json:
    """Arguments as a JSON object, passed on verbatim."""

    begin = end = ""
    free = True

    def tree(self, schema: Schema, tool: str) -> Node:
        """One value."""
        return leaf(schema)

    def spell(self, arguments: str, tool: str) -> str:
        """As they are."""
        return arguments.strip() or "{}"

    def read(self, source: Source, sink: Sink, stop: str) -> Step[bool]:
        """An object: anything else is no call."""
        yield from source.spaces()
        if not (yield from source.ahead("{")):
            return False
        return (yield from pass_value(source, sink.write, stop)) or (yield from _cut(source, stop))


@dataclass(frozen=True, slots=True)
class Pair:
    """A name, a text, and the arguments."""

    middle: str = ""
    syntax: Syntax = field(default_factory=Json)
    aside: str = ""  # a marker that may follow the name with a text (an id) up to `middle`, which is passed over

    def around(self, name: str) -> tuple[str, str]:
        """The name is written bare."""
        return name + self.middle + self.syntax.begin, self.syntax.end

    def read(self, source: Source, sink: Sink, *, stop: str, plain: bool) -> Step[bool]:
        """Name, middle, arguments."""
        yield from source.spaces()
        name = yield from source.word(_NAME, LONGEST_NAME)
        if not name:
            return False
        if self.aside:
            if not (yield from source.literal(self.aside)):
                return False
            yield from source.word(_NAME, LONGEST_NAME)
        if not (yield from source.literal(self.middle)):
            return False
        sink.call(name)
        return (yield from self.syntax.read(source, sink, stop))


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object that holds the name and the arguments, in any order when read."""

    arguments: str = "arguments"
    syntax: Syntax = field(default_factory=Json)

    def around(self, name: str) -> tuple[str, str]:
        """Name first, one space after the punctuation: the compact JSON of constraints."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": ', "}"

    def read(self, source: Source, sink: Sink, *, stop: str, plain: bool) -> Step[bool]:
        """Key by key. The first of two equal keys counts; what is not known is passed over."""
        reading = _Reading(sink)
        if not (yield from source.literal("{")):
            return False
        while True:
            yield from source.spaces()
            key = yield from read_string(source)
            if key is None or (plain and not reading.begun and key not in ("name", *_ARGUMENTS, *_OTHERS)):
                return False
            if not (yield from source.literal(":")):
                return False
            yield from source.spaces()
            if not (yield from self._value(source, reading, key, stop)):
                return reading.begun and (yield from _cut(source, stop))
            yield from source.spaces()
            if (yield from source.try_take("}")):
                return reading.end(plain)
            if not (yield from source.try_take(",")):
                return reading.begun and (yield from _cut(source, stop))

    def _value(self, source: Source, reading: _Reading, key: str, stop: str) -> Step[bool]:
        if key == "name" and reading.name is None:
            reading.name = yield from read_string(source)
            if reading.name and reading.early is not None:
                reading.begin(reading.early)
            return bool(reading.name)
        if key in _ARGUMENTS and not reading.begun and reading.early is None:
            if not value_begins((yield from source.peek())):
                return False
            if reading.name is not None:
                reading.begin("")
                return (yield from pass_value(source, reading.sink.write, stop))
            parts: list[str] = []
            whole = yield from pass_value(source, parts.append, stop)
            reading.early = "".join(parts)
            return whole
        return (yield from pass_value(source, ignore, stop))


class _Reading:
    """What is known of a record."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.name: str | None = None
        self.early: str | None = None  # arguments that came before the name
        self.begun = False  # the sink has the arguments, or some of them

    def begin(self, arguments: str) -> None:
        """Both are known, the arguments perhaps not to their end."""
        assert self.name is not None
        self.begun = True
        self.sink.call(self.name)
        self.sink.write(arguments)

    def end(self, plain: bool) -> bool:
        """The record is closed. One without arguments calls with none, if a marker said that it is a call."""
        if not self.begun and self.name is not None and not plain:
            self.sink.call(self.name)
            self.sink.write("{}")
            self.begun = True
        return self.begun


def _cut(source: Source, stop: str) -> Step[bool]:
    """Does the format's own closing marker stand where the record should go on? Then the model left out its end."""
    return bool(stop) and (yield from source.ahead(stop))


def no_arguments(tool: str, what: str) -> RequestError:
    """A schema that a syntax other than JSON cannot hold to."""
    return RequestError(
        f"this model's format of calls cannot enforce {what} in the parameters of tool {tool}",
        hint='leave it out, or do not force the call: tool_choice "auto" without strict',
        param="tools",
    )
