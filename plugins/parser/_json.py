"""JSON as models write it, read character by character and passed on as it stands."""

from __future__ import annotations

import json
import re

from ._source import Source, Step, Write

LONGEST_NAME = 256  # characters of a name or key, between its quotes; a longer one is none
_IN_STRING = re.compile(r'[^"\\]*')
_IN_WORD = re.compile(r"[\w.+-]*")
_IN_NEST = re.compile(r'[^"{}\[\]<]*')


def ignore(text: str) -> None:
    """A `Write` for what nobody wants."""


def pass_string(source: Source, write: Write, limit: int | None = None) -> Step[bool]:
    """Pass on a string, its quotes included; False if it does not end, or not within `limit` characters."""
    write(source.take(1))
    size = 0
    while limit is None or size < limit:  # a limit is met at one character, however the text was cut
        char = yield from source.peek()
        if char == '"':
            write(source.take(1))
            return True
        if not char:
            return False
        if char == "\\":
            text = source.take(len((yield from source.window(2))))
        else:
            text = source.run(_IN_STRING, None if limit is None else limit - size)
        write(text)
        size += len(text)
    return False


def read_string(source: Source) -> Step[str | None]:
    """The value of a short string; None if none is here, or its escapes are wrong."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from pass_string(source, parts.append, LONGEST_NAME)):
        return None
    try:
        return str(json.loads("".join(parts), strict=False))
    except ValueError:
        return None


def value_begins(char: str) -> bool:
    """Whether a value, or a word in place of one, may begin with a character."""
    return bool(char) and (char in '"{[' or bool(_IN_WORD.match(char)[0]))  # type: ignore[index]


def pass_value(source: Source, write: Write, stop: str = "") -> Step[bool]:
    """Pass on one value, verbatim: only strings and the depth of brackets are looked at.

    `stop`: a text beginning with "<" that no JSON has outside of strings. Where it follows, the value ends unfinished.
    False if it is unfinished, or nothing is here.
    """
    char = yield from source.peek()
    if char == '"':
        return (yield from pass_string(source, write))
    if char not in ("{", "["):
        return (yield from _pass_word(source, write))
    depth = 0
    while char:
        write(source.run(_IN_NEST))
        char = yield from source.peek()
        if char == '"':
            yield from pass_string(source, write)
        elif char == "<":
            if stop and (yield from source.ahead(stop)):
                return False
            write(source.take(1))
        elif char and char in "{}[]":
            depth += 1 if char in "{[" else -1
            write(source.take(1))
            if depth == 0:
                return True
    return False


def _pass_word(source: Source, write: Write) -> Step[bool]:
    """A number, true, false or null: whatever has no space and no punctuation."""
    found = False
    while (yield from source.peek()) and (text := source.run(_IN_WORD)):
        write(text)
        found = True
    return found
