"""Arguments as keyword arguments of a Python call: Python's literals and JSON's are both read, JSON's are written."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from ._call import Sink, no_arguments
from ._exact import Number, json_word, loads, quoted
from ._json import LONGEST_NAME
from ._source import Source, Step, Write, after
from ._tree import Member, Node, Schema, leaf, listed, properties_of

_KEYWORD = re.compile(r"\w")
_WORD = re.compile(r"[\w.+-]")
_PLAIN = re.compile(r"[^\\\"'\x00-\x1f]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_OCTAL = re.compile(r"[0-7]+")
_ESCAPES = {
    **{"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"'},
    **{"a": "\\u0007", "v": "\\u000b", "\n": ""},
}
_SIZES = {"x": 2, "u": 4, "U": 8}
# Of a schema's top level: the rest would hold across arguments, which a list of them cannot express.
_KNOWN = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_DEFINITIONS = ("$defs", "definitions")


class Python:
    """`a=1, b="x"` between parentheses. Read with Python's meaning, once; written with JSON's values."""

    begin, end = "(", ")"
    free = False

    def tree(self, schema: Schema, tool: str) -> Node:
        """Required arguments first, each with its own schema; what the schema does not name is not an argument."""
        for keyword in set(schema) - _KNOWN - set(_DEFINITIONS):
            raise no_arguments(tool, keyword)
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        required = schema.get("required", [])
        properties = properties_of(schema)
        for name in properties:
            if not name.isidentifier():
                raise no_arguments(tool, f"the name {name!r}")
        members = [
            Member(f"{name}=", leaf({**value, **shared} if isinstance(value, dict) else value), name in required)
            for name, value in properties.items()
        ]
        return listed(members, ", ")

    def spell(self, arguments: str, tool: str) -> str:
        """JSON values are what the constraint asks for, too."""
        return ", ".join(f"{name}={_spelled(value)}" for name, value in loads(arguments, tool).items())

    def read(self, source: Source, sink: Sink, stop: str) -> Step[bool]:
        """Keyword by keyword. The call begins when its first value is seen to be a literal, or with `()`."""
        if not (yield from source.try_take(self.begin)):
            return False
        lead = "{"
        while True:
            yield from source.spaces()
            if (yield from source.try_take(self.end)):
                sink.write("{}" if lead == "{" else "}")
                return True
            name = yield from source.word(_KEYWORD, LONGEST_NAME)
            if not name.isidentifier() or not (yield from source.literal("=")):
                return False
            yield from source.spaces()
            if not (yield from _literal(source, after(f"{lead}{quoted(name)}: ", sink.write))):
                return False
            lead = ", "
            yield from source.spaces()
            if not (yield from source.try_take(",")) and not (yield from source.ahead(self.end)):
                return False


def _literal(source: Source, write: Write) -> Step[bool]:
    """One literal, lists and dicts within it included, as JSON; False where it is none any more."""
    open_brackets: list[str] = []
    while True:
        char = yield from source.peek()
        if char and char in "[{":
            write(source.take(1))
            open_brackets.append("]" if char == "[" else "}")
            lead = ""
        elif not (yield from _single(source, write)):
            return False
        else:
            lead = ", "
        while open_brackets:
            ended = yield from _next(source, write, open_brackets[-1], lead)
            if ended is None:
                return False
            if not ended:
                break
            open_brackets.pop()
            lead = ", "
        if not open_brackets:
            return True


def _next(source: Source, write: Write, closing: str, lead: str) -> Step[bool | None]:
    """Up to the next value of a list or dict: False; True if it is closed instead, None if neither."""
    yield from source.spaces()
    if lead and not (yield from source.try_take(",")):
        lead, closed = "", (yield from source.ahead(closing))
        if not closed:
            return None
    yield from source.spaces()
    if (yield from source.try_take(closing)):
        write(closing)
        return True
    write(lead)
    if closing == "]":
        return False
    if (yield from source.peek()) not in ("'", '"') or not (yield from _string(source, write)):
        return None  # a key that is no string has no JSON
    if not (yield from source.literal(":")):
        return None
    write(": ")
    yield from source.spaces()
    return False


def _single(source: Source, write: Write) -> Step[bool]:
    """A string, number or constant."""
    if (yield from source.peek()) in ("'", '"'):
        return (yield from _string(source, write))
    word = json_word((yield from source.word(_WORD, LONGEST_NAME)))
    write(word or "")
    return word is not None


def _string(source: Source, write: Write) -> Step[bool]:
    """A string in either quotes, or in three of them, as a JSON string."""
    quote = source.take(1)
    if (yield from source.ahead(quote * 2)):
        source.take(2)
        quote *= 3
    write('"')
    while True:
        write(source.run(_PLAIN))
        char = yield from source.peek()
        if not char:
            return False
        if char == "\\":
            source.take(1)
            yield from _escape(source, write)
        elif (yield from source.try_take(quote)):
            write('"')
            return True
        elif not _PLAIN.match(char).end():  # type: ignore[union-attr]
            write(json.dumps(source.take(1))[1:-1])


def _escape(source: Source, write: Write) -> Step[None]:
    """What follows a backslash; one that begins no escape stands for itself, as in Python."""
    char = yield from source.peek()
    if char in _ESCAPES and char:
        source.take(1)
        write(_ESCAPES[char])
    elif char in _SIZES:
        size = _SIZES[char]
        digits = (yield from source.window(size + 1))[1:]
        if len(digits) < size or len(_HEX.match(digits)[0]) < size or int(digits, 16) > 0x10FFFF:  # type: ignore[index]
            write("\\\\")
            return
        source.take(size + 1)
        write(f"\\u{digits}" if size == 4 else json.dumps(chr(int(digits, 16)))[1:-1])
    elif match := _OCTAL.match((yield from source.window(3))):
        source.take(match.end())
        write(json.dumps(chr(int(match[0], 8)))[1:-1])
    elif char == "N":
        yield from _named(source, write)
    else:
        write("\\\\")


def _named(source: Source, write: Write) -> Step[None]:
    """A character by its Unicode name."""
    head = yield from source.window(2)
    size = 2
    while head == "N{" and size < 100 and not (text := (yield from source.window(size))).endswith("}"):
        if len(text) < size:
            break
        size += 1
    text = yield from source.window(size)
    try:
        char = unicodedata.lookup(text[2:-1]) if head == "N{" and text.endswith("}") else ""
    except KeyError:
        char = ""
    write(json.dumps(char)[1:-1] if char else "\\\\")
    if char:
        source.take(size)


def _spelled(value: Any) -> str:
    if isinstance(value, Number):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)}: {_spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
