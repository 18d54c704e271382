"""JSON schemas as regular expressions, for outlines, and as grammars, for xgrammar: what is enforced is written.

The rest is in the report's table. The libraries' own translations drop what they do not know (patterns beside lengths,
keywords beside references), each something else; so only their automata are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from phloem.constraint import Constraint
from phloem.errors import RequestError

from . import _json_regex as rx
from ._disjoint import type_of, types_of, values_of
from ._json_number import exact, number
from ._notation import Facets, Layout, Notation
from ._refs import Place, References
from ._report import misshapen
from ._schema_support import facets_of, lost_text

MAX_DEPTH = 100  # of schemas within schemas, references followed


def written(schema: Any, constraint: Constraint, notation: Notation, pointer: str = "#") -> str:
    """The values of a schema, as far as the report says; properties come in the schema's order.

    `pointer`: where the schema lies, for errors. Raises RequestError(param=constraint.kind) for what is no schema,
    where nothing satisfies it, and where written out it is too large. Called once per schema, by `compile`.
    """
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema is an object, true or false", param=constraint.kind)
    writer = _Writer(schema, constraint, notation, pointer)
    found = writer.value(schema, "#")
    while writer.revived():  # references to themselves were taken for empty: now less of them are
        found = writer.value(schema, "#")
    if found is None:
        raise RequestError(f"no text satisfies this {constraint.kind}", param=constraint.kind)
    return found


class _Writer:
    """Recursive descent; each method returns None where nothing satisfies its schema."""

    def __init__(self, root: Any, constraint: Constraint, notation: Notation, prefix: str) -> None:
        self.references, self.notation = References(root), notation
        self.layout = Layout(constraint.whitespace, notation)
        self.kind, self.whitespace, self.prefix = constraint.kind, constraint.whitespace, prefix
        self.open: list[int] = []  # references that are being followed
        self.names: dict[int, str] = {}  # rules of schemas that references name, by their ids
        self.bodies: dict[int, str | None] = {}  # what these are, where it is known
        self.looped: set[int] = set()  # of those, the ones that refer to themselves
        self.alive: set[int] = set()  # and of those, the ones that some text satisfies
        self.nodes = self.written = self.depth = 0
        version = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.old = any(f"draft-0{number}" in version for number in (3, 4, 6, 7))

    def revived(self) -> bool:
        """Whether the last run has found texts for schemas that it took to have none; then it must be run again."""
        found = {key for key in self.looped - self.alive if self.bodies.get(key) is not None}
        self.alive |= found
        if found:
            self.bodies.clear()
            self.notation.restart()
            self.layout = Layout(self.whitespace, self.notation)
            self.nodes = self.written = 0
        return bool(found)

    def value(self, schema: Any, at: str) -> str | None:
        """Any schema."""
        if isinstance(schema, bool) or schema == {}:
            return None if schema is False else self.notation.any_value(self.layout)
        if not isinstance(schema, dict):
            raise self._refuse(at, "is no schema: neither an object nor true or false")
        for keyword, why in misshapen(schema):
            raise self._refuse(f"{at}/{keyword}", why)
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise self._refuse(at, f"the schema is nested deeper than {MAX_DEPTH}")
        found = self._schema(schema, at)
        self.depth -= 1
        self.written += len(found or "")
        if self.nodes > self.notation.max_nodes or self.written > self.notation.max_text:
            raise self._refuse(at, "written out, with its references, the schema is too large for an automaton")
        return found

    def _schema(self, schema: dict[str, Any], at: str) -> str | None:
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], at)
        values = values_of(schema)
        if values is not None:
            return self.notation.any_of(
                [self.layout.value(value) for value in values if type_of(value) in types_of(schema)]
            )
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                branches = schema[keyword][: 1 if keyword == "allOf" else None]
                return self.notation.any_of(
                    [self.value(branch, f"{at}/{keyword}/{i}") for i, branch in enumerate(branches)]
                )
        types = types_of(schema)
        judged = [name for name in sorted(types) if name != "integer" or "number" not in types]
        makers: Mapping[str, Callable[[dict[str, Any], str], str | None]] = {
            "null": lambda schema, at: self.notation.literal("null"),
            "boolean": lambda schema, at: self.notation.regex("(?:true|false)"),
            "string": self._string,
            "integer": lambda schema, at: self._regex(rx.integer(*_whole_bounds(schema))),
            "number": lambda schema, at: self._regex(_number(schema)),
            "array": self._array,
            "object": self._object,
        }
        return self.notation.any_of([makers[name](schema, at) for name in judged])

    def _reference(self, name: Any, at: str) -> str | None:
        place = self.references.resolve(name)
        if place is None:
            raise self._refuse(f"{at}/$ref", f"{name!r} is nothing in this schema")
        key = id(place.schema)
        if self.notation.recursive:
            return self._rule(key, place)
        if key in self.open:
            raise self._refuse(
                f"{at}/$ref", f"{name!r} refers to what it is a part of: nesting without end is not regular"
            )
        self.open.append(key)
        found = self.value(place.schema, place.pointer)
        self.open.pop()
        return found

    def _rule(self, key: int, place: Place) -> str | None:
        """A rule that is written once. None as long as no text is known to satisfy it."""
        if key in self.bodies:
            return self.bodies[key]
        if key in self.open:
            self.looped.add(key)
            return self.names[key] if key in self.alive else None
        self.names.setdefault(key, self.notation.named())
        self.open.append(key)
        found = self.value(place.schema, place.pointer)
        self.open.pop()
        self.bodies[key] = None if found is None else self.notation.define(self.names[key], found)
        return self.bodies[key]

    def _regex(self, pattern: str | None) -> str | None:
        return None if pattern is None else self.notation.regex(pattern)

    def _string(self, schema: dict[str, Any], at: str) -> str | None:
        least, most = self._counts(schema, "Length", at)
        facets = facets_of(self.notation, schema)._replace(least=least, most=most)
        if lost_text(self.notation, facets) is not None:  # which the report has said
            facets = Facets(None, facets.format, *((0, None) if facets.format else (least, most)))
        return self.notation.text(facets, self.kind)

    def _array(self, schema: dict[str, Any], at: str) -> str | None:
        items = schema.get("items", True)
        first, rest, key = schema.get("prefixItems", []), items, "prefixItems"
        if isinstance(items, list):
            first, rest, key = items, schema.get("additionalItems", True), "items"
        least, most = self._counts(schema, "Items", at)
        heads = [self.value(item, f"{at}/{key}/{i}") for i, item in enumerate(first[:most])]
        tail = self.value(rest, f"{at}/items") if most is None or most > len(first) else None
        if None in heads:
            most = heads.index(None)
        elif tail is None and len(heads) == len(first):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            return None
        comma, bound = self.layout.comma, _less(most, len(heads))
        if tail is None:
            body = ""
        elif heads:
            body = self.notation.repeated(f"{comma}{tail}", max(least - len(heads), 0), bound)
        else:
            body = self.layout.listed(tail, least, bound)
        for i in range(len(heads[:most]) - 1, -1, -1):
            body = f"{comma if i else ''}{heads[i]}{body}"
            body = f"{self.notation.group(body)}?" if i >= max(least, 1) else body
        return self.layout.array(body, least == 0)

    def _object(self, schema: dict[str, Any], at: str) -> str | None:
        properties, required = schema.get("properties", {}), list(schema.get("required", []))
        extra = schema.get("additionalProperties", "properties" not in schema)
        other = self.value(extra, f"{at}/additionalProperties")
        unknown = other if "additionalProperties" in schema else self.value(True, at)  # a name only in `required`
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            known = name in properties
            found = self.value(properties[name], f"{at}/properties/{name}") if known else unknown
            if found is not None:
                members.append((f"{self.notation.literal(rx.dumps(name))}{self.layout.colon}{found}", name in required))
            elif name in required:
                return None
        least, most = self._counts(schema, "Properties", at)
        if most is not None and most < max(least, sum(needed for _, needed in members)):
            return None
        rest = None if other is None else f"{self._key([*properties, *required])}{self.layout.colon}{other}"
        if members:
            return self.layout.object(self._members(members, rest), not any(needed for _, needed in members))
        if rest is None:
            return None if least else self.layout.object("", True)
        return self.layout.object(self.layout.listed(rest, least, most), least == 0)

    def _key(self, others: list[str]) -> str:
        """A key that is none of these."""
        return self.notation.regex(rx.other_key(others)) if others else self.notation.string(0, None)

    def _members(self, members: list[tuple[str, bool]], rest: str | None) -> str:
        """One at least, in their order, those that are not required maybe left out. Before the first is no comma."""
        comma, group = self.layout.comma, self.notation.group
        tails = ["" if rest is None else f"{group(comma + rest)}*"]  # what may follow the last, the one before, ...
        for text, needed in reversed(members):
            tail = f"{comma}{text}" if needed else f"{group(comma + text)}?"
            tails.append(self.notation.tail(tail + tails[-1]))
        tails.reverse()
        firsts: list[str | None] = [f"{text}{tails[i + 1]}" for i, (text, _) in enumerate(members)]
        last = next((i for i, (_, needed) in enumerate(members) if needed), None)
        if last is not None:
            return self.notation.any_of(firsts[: last + 1]) or ""
        self.written += sum(len(text or "") for text in firsts)
        return self.notation.any_of([*firsts, None if rest is None else rest + tails[-1]]) or ""

    def _counts(self, schema: dict[str, Any], what: str, at: str) -> tuple[int, int | None]:
        limit = self.notation.max_count
        for bound in (f"min{what}", f"max{what}"):
            if limit is not None and schema.get(bound, 0) > limit:
                raise self._refuse(f"{at}/{bound}", f"{bound} {schema[bound]} exceeds {limit}")
        return schema.get(f"min{what}", 0), schema.get(f"max{what}")

    def _refuse(self, at: str, why: str) -> RequestError:
        return RequestError(
            f"{self.kind}: {self.prefix}{at[1:]}: {why}",
            hint="use another grammar backend for this schema (`grammar: {use: auto}` tries them all)",
            param=self.kind,
        )


def _less(most: int | None, count: int) -> int | None:
    return None if most is None else max(most - count, 0)


def _whole_bounds(schema: dict[str, Any]) -> tuple[float | None, float | None]:
    """Bounds of an integer, which are in."""
    lows, highs = [schema.get("minimum")], [schema.get("maximum")]
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    return (
        max((low for low in lows if low is not None), default=None),
        min((high for high in highs if high is not None), default=None),
    )


def _number(schema: dict[str, Any]) -> str | None:
    lows = [(exact(schema[key]), key == "exclusiveMinimum") for key in _LOWS if key in schema]
    highs = [(exact(schema[key]), key != "exclusiveMaximum") for key in _HIGHS if key in schema]
    if not lows and not highs:
        return rx.NUMBER
    low, high = max(lows, default=None), min(highs, default=None)
    return number(
        None if low is None else low[0],
        None if high is None else high[0],
        above=low is not None and low[1],
        below=high is not None and not high[1],
    )


_LOWS, _HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
