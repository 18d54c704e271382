"""Arguments in Gemma's notation: bare keys, strings between two markers and never escaped, the rest as in JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ._call import Sink, no_arguments
from ._exact import Number, json_word, loads, quoted
from ._json import LONGEST_NAME
from ._source import Markers, Source, Step, Write, after
from ._tree import Member, Node, Schema, const, either, leaf, listed, optional, properties_of, separated, sequence, tag

_BARE = re.compile(r"[^,:\[\]{}<]")
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "nullable", "$schema"}
# What each type's schema may say beside: everything else is refused, as the tree below would not hold to it.
_KNOWN = {
    "string": {"maxLength"},
    "array": {"items", "minItems"},
    "object": {"properties", "required", "additionalProperties", "$defs", "definitions"},
}
_SCALARS = ("number", "integer", "boolean", "null")
_MOST_REFERENCES = 16  # one in another: a schema that refers to itself has no tree


@dataclass(frozen=True, slots=True)
class Gemma:
    """`{city:<escape>Oslo<escape>,days:3}`; `quote` is what stands around strings."""

    quote: str
    begin: str = "{"
    end: str = "}"
    free: bool = False

    def tree(self, schema: Schema, tool: str) -> Node:
        """The members of the arguments; the schema's structure is followed down to strings and scalars."""
        return _Tree(self.quote, tool, schema).members(schema, 0)

    def spell(self, arguments: str, tool: str) -> str:
        """Bare keys on every level."""
        return self._spelled(loads(arguments, tool))[1:-1]

    def _spelled(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._spelled(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._spelled, value)) + "]"
        if isinstance(value, str):
            return value if isinstance(value, Number) else f"{self.quote}{value}{self.quote}"
        return json.dumps(value)

    def read(self, source: Source, sink: Sink, stop: str) -> Step[bool]:
        """The call begins with its brace: in this format a marker has said that it is one."""
        if not (yield from source.ahead(self.begin)):
            return False
        sink.write(source.take(1))
        brackets, lead = ["}"], ""
        while brackets:
            yield from source.spaces()
            if lead and (yield from source.try_take(",")):
                yield from source.spaces()
            elif lead and not (yield from source.ahead(brackets[-1])):
                return False
            if (yield from source.try_take(brackets[-1])):
                sink.write(brackets.pop())
                lead = ", "
                continue
            write = after(lead, sink.write)
            if brackets[-1] == "}" and not (yield from self._key(source, write)):
                return False
            char = yield from source.peek()
            if char and char in "[{":
                write(source.take(1))
                brackets.append("]" if char == "[" else "}")
                lead = ""
            elif not (yield from self._scalar(source, write)):
                return False
            else:
                lead = ", "
        return True

    def _key(self, source: Source, write: Write) -> Step[bool]:
        if (yield from source.ahead(self.quote)):
            whole = yield from self._string(source, write)
        else:
            name = yield from source.word(_BARE, LONGEST_NAME)
            whole = bool(name.strip())
            write(quoted(name.strip()) if whole else "")
        if not whole or not (yield from source.literal(":")):
            return False
        write(": ")
        yield from source.spaces()
        return True

    def _scalar(self, source: Source, write: Write) -> Step[bool]:
        """A string; or a bare word: a number or constant, else a string that lacks its markers."""
        if (yield from source.ahead(self.quote)):
            return (yield from self._string(source, write))
        word = (yield from source.word(_BARE, LONGEST_NAME)).strip()
        write((json_word(word) or quoted(word)) if word else "")
        return bool(word)

    def _string(self, source: Source, write: Write) -> Step[bool]:
        source.take(len(self.quote))
        write('"')
        if not (yield from source.until(Markers([self.quote]), lambda text: write(quoted(text)[1:-1]))):
            return False
        source.take(len(self.quote))
        write('"')
        return True


class _Tree:
    """What may stand for a schema in Gemma's notation."""

    def __init__(self, quote: str, tool: str, root: Schema) -> None:
        self.quote, self.tool, self.root = quote, tool, root

    def members(self, schema: Schema, depth: int) -> Node:
        """`key:value` for each property, required ones first."""
        self._only(schema, "object")
        required = schema.get("required", [])
        properties = properties_of(schema)
        for name in properties:
            if not name or name.strip() != name or not all(map(_BARE.match, name)):
                raise no_arguments(self.tool, f"the name {name!r}")
        return listed(
            [Member(f"{name}:", self.value(item, depth), name in required) for name, item in properties.items()], ","
        )

    def value(self, schema: Schema | bool, depth: int) -> Node:
        """One value."""
        if not isinstance(schema, dict):
            schema = {}
        if "$ref" in schema:
            return self._referred(schema["$ref"], depth)
        if "enum" in schema or "const" in schema:
            spelled = Gemma(self.quote)
            return either(*(const(spelled._spelled(v)) for v in schema.get("enum", [schema.get("const")])))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return either(*(self.value(item, depth) for item in schema[keyword]))
        kinds = schema.get("type", ["string", "number", "boolean", "null"])
        if isinstance(kinds, list):
            return either(*(self.value({**schema, "type": kind}, depth) for kind in kinds))
        return self._typed(schema, kinds, depth)

    def _typed(self, schema: Schema, kind: str, depth: int) -> Node:
        if kind in _SCALARS:
            return leaf(schema)
        self._only(schema, kind)
        if kind == "object":
            return sequence(const("{"), self.members(schema, depth), const("}"))
        if kind == "array":
            items = separated([tag("", self.value(schema.get("items", {}), depth), "")], ",")
            enough = schema.get("minItems", 0)
            if enough > 1:
                raise no_arguments(self.tool, f"minItems {enough}")
            return sequence(const("["), items if enough else optional(items), const("]"))
        text: Node = {"type": "any_text"}
        if "maxLength" in schema:
            text["max_chars"] = schema["maxLength"]
        return tag(self.quote, text, self.quote)

    def _referred(self, reference: str, depth: int) -> Node:
        target: Any = self.root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        if target is None or depth >= _MOST_REFERENCES or not reference.startswith("#/"):
            raise no_arguments(self.tool, f"$ref {reference}")
        return self.value(target, depth + 1)

    def _only(self, schema: Schema, kind: str) -> None:
        for keyword in sorted(set(schema) - _ANNOTATIONS - _KNOWN.get(kind, set())):
            raise no_arguments(self.tool, keyword)
