"""JSON schemas as regular expressions, for outlines: what is enforced is written, the rest is in the report's table.

The library's own translation drops what it does not know (patterns beside lengths, bounds of numbers, keywords beside
references) and has one pattern of whitespace for all places; so only its automata are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phloem.constraint import Constraint
from phloem.errors import RequestError

from . import _json_regex as rx
from ._disjoint import type_of, types_of, values_of
from ._json_pattern import pattern_regex
from ._json_regex import Layout
from ._refs import References
from ._regex import literal
from ._report import Node, Support

NAME = "outlines"
ANY_DEPTH = 2  # arrays and objects within a value of which the schema says nothing
MAX_NODES = 5000  # schemas written out, references followed
MAX_TEXT = 2_000_000  # characters of the expression
_KEYWORDS = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "minLength", "maxLength", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"items", "items[]", "additionalItems", "prefixItems", "minItems", "maxItems"}
    | {"properties", "additionalProperties", "required", "minProperties", "maxProperties"}
)


def schema_regex(schema: Any, constraint: Constraint, pointer: str = "#") -> str:
    """The values of a schema, as far as the report says; properties come in the schema's order.

    `pointer`: where the schema lies, for errors. Raises RequestError(param=constraint.kind) where nothing satisfies
    it, where it refers to itself, and where written out it is too large. Called once per schema, by `compile`.
    """
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema is an object, true or false", param=constraint.kind)
    writer = _Writer(schema, constraint, pointer)
    found = writer.value(schema, "#")
    if found is None:
        raise RequestError(f"no text satisfies this {constraint.kind}", param=constraint.kind)
    return found


def object_regex(layout: Layout) -> str:
    """Any object, nested as deep as any value of which a schema says nothing."""
    return _any_object(layout, ANY_DEPTH)


class _Writer:
    """Recursive descent; each method returns None where nothing satisfies its schema."""

    def __init__(self, root: Any, constraint: Constraint, prefix: str) -> None:
        self.references, self.layout = References(root), Layout(constraint.whitespace)
        self.kind, self.prefix = constraint.kind, prefix
        self.open: list[int] = []  # references that are being followed
        self.nodes = self.written = 0
        version = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.old = any(f"draft-0{number}" in version for number in (3, 4, 6, 7))

    def value(self, schema: Any, at: str) -> str | None:
        """Any schema."""
        if isinstance(schema, bool) or not schema:
            return None if schema is False else _any_value(self.layout, ANY_DEPTH)
        if not isinstance(schema, dict):
            raise self._refuse(at, "is no schema: neither an object nor true or false")
        self.nodes += 1
        found = self._schema(schema, at)
        self.written += len(found or "")
        if self.nodes > MAX_NODES or self.written > MAX_TEXT:
            raise self._refuse(at, "written out, with its references, the schema is too large for an automaton")
        return found

    def _schema(self, schema: dict[str, Any], at: str) -> str | None:
        if "$ref" in schema:
            return self._reference(schema["$ref"], at)
        values = values_of(schema)
        if values is not None:
            return rx.any_of([self.layout.value(value) for value in values if type_of(value) in types_of(schema)])
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                branches = schema[keyword][: 1 if keyword == "allOf" else None]
                return rx.any_of([self.value(branch, f"{at}/{keyword}/{i}") for i, branch in enumerate(branches)])
        types = types_of(schema)
        judged = [name for name in sorted(types) if name != "integer" or "number" not in types]
        makers: Mapping[str, Callable[[dict[str, Any], str], str | None]] = {
            "null": lambda schema, at: "null",
            "boolean": lambda schema, at: "(?:true|false)",
            "string": self._string,
            "integer": lambda schema, at: rx.integer(*_whole_bounds(schema)),
            "number": lambda schema, at: _number(schema),
            "array": self._array,
            "object": self._object,
        }
        return rx.any_of([makers[name](schema, at) for name in judged])

    def _reference(self, name: Any, at: str) -> str | None:
        place = self.references.resolve(name)
        if place is None:
            raise self._refuse(f"{at}/$ref", f"{name!r} is nothing in this schema")
        if id(place.schema) in self.open:
            raise self._refuse(
                f"{at}/$ref", f"{name!r} refers to what it is a part of: nesting without end is not regular"
            )
        self.open.append(id(place.schema))
        found = self.value(place.schema, place.pointer)
        self.open.pop()
        return found

    def _string(self, schema: dict[str, Any], at: str) -> str | None:
        if schema.get("format") in rx.FORMATS:
            return f'"{rx.FORMATS[schema["format"]]}"'
        if "pattern" in schema and _lost_pattern(schema["pattern"]) is None:
            return f'"{pattern_regex(schema["pattern"], self.kind, "")}"'
        least, most = _counts(schema, "Length")
        return None if most is not None and most < least else rx.string(least, most)

    def _array(self, schema: dict[str, Any], at: str) -> str | None:
        items = schema.get("items", True)
        first, rest, key = schema.get("prefixItems", []), items, "prefixItems"
        if isinstance(items, list):
            first, rest, key = items, schema.get("additionalItems", True), "items"
        least, most = _counts(schema, "Items")
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
            body = rx.repeated(f"{comma}{tail}", max(least - len(heads), 0), bound)
        else:
            body = self.layout.listed(tail, least, bound)
        for i in range(len(heads[:most]) - 1, -1, -1):
            body = f"{comma if i else ''}{heads[i]}{body}"
            body = f"(?:{body})?" if i >= max(least, 1) else body
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
                members.append((f"{literal(rx.dumps(name))}{self.layout.colon}{found}", name in required))
            elif name in required:
                return None
        least, most = _counts(schema, "Properties")
        if most is not None and most < max(least, sum(needed for _, needed in members)):
            return None
        rest = None if other is None else f"{rx.other_key([*properties, *required])}{self.layout.colon}{other}"
        if members:
            return self.layout.object(self._members(members, rest), not any(needed for _, needed in members))
        if rest is None:
            return None if least else self.layout.object("", True)
        return self.layout.object(self.layout.listed(rest, least, most), least == 0)

    def _members(self, members: list[tuple[str, bool]], rest: str | None) -> str:
        """One at least, in their order, those that are not required maybe left out. Before the first is no comma."""
        comma = self.layout.comma
        tails = ["" if rest is None else f"(?:{comma}{rest})*"]  # what may follow the last member, the one before, ...
        for text, needed in reversed(members):
            tails.append(f"{comma}{text}{tails[-1]}" if needed else f"(?:{comma}{text})?{tails[-1]}")
        tails.reverse()
        firsts = [f"{text}{tails[i + 1]}" for i, (text, _) in enumerate(members)]
        last = next((i for i, (_, needed) in enumerate(members) if needed), None)
        if last is not None:
            return f"(?:{'|'.join(firsts[: last + 1])})"
        self.written += sum(map(len, firsts))
        return f"(?:{'|'.join([*firsts, *([] if rest is None else [rest + tails[-1]])])})"

    def _refuse(self, at: str, why: str) -> RequestError:
        return RequestError(
            f"{self.kind}: {self.prefix}{at[1:]}: {why}",
            hint="use another grammar backend for this schema (`grammar: {use: auto}` finds one)",
            param=self.kind,
        )


def _any_value(layout: Layout, depth: int) -> str:
    """A value of any type, with at most `depth` arrays and objects within each other."""
    nested = [] if depth == 0 else [_any_array(layout, depth), _any_object(layout, depth)]
    return f"(?:{'|'.join(['null|true|false', rx.NUMBER, rx.string(0, None), *nested])})"


def _any_array(layout: Layout, depth: int) -> str:
    return layout.array(layout.listed(_any_value(layout, depth - 1), 0, None), True)


def _any_object(layout: Layout, depth: int) -> str:
    member = f"{rx.string(0, None)}{layout.colon}{_any_value(layout, depth - 1)}"
    return layout.object(layout.listed(member, 0, None), True)


def _counts(schema: dict[str, Any], what: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    return int(least), None if most is None else int(most)


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
    low = max(
        ((schema[key], key == "exclusiveMinimum") for key in ("minimum", "exclusiveMinimum") if key in schema),
        default=None,
    )
    high = min(
        ((schema[key], key != "exclusiveMaximum") for key in ("maximum", "exclusiveMaximum") if key in schema),
        default=None,
    )
    if low is None and high is None:
        return rx.NUMBER
    return rx.number(
        None if low is None else int(low[0]),
        None if high is None else int(high[0]),
        above=low is not None and low[1],
        below=high is not None and not high[1],
    )


def _lost_pattern(pattern: Any) -> str | None:
    """Why a pattern is not enforced."""
    try:
        pattern_regex(pattern, "pattern", f"{NAME}: ")
    except RequestError as error:
        return error.message
    return None


def _check(node: Node) -> Iterator[tuple[str, str]]:
    """What depends on the value of a keyword, or on others beside it."""
    active, types = node.active, node.types
    if isinstance(active.get("allOf"), list) and len(active["allOf"]) > 1:
        yield "allOf", f"{NAME} cannot combine schemas"
    if "multipleOf" in active and not (active["multipleOf"] == 1 and "number" not in types):
        yield "multipleOf", f"{NAME} ignores multipleOf"
    if isinstance(active.get("pattern"), str) and (why := _lost_pattern(active["pattern"])) is not None:
        yield "pattern", why
    if "number" in types:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = active.get(keyword)
            if isinstance(bound, float) and not bound.is_integer():
                yield keyword, f"{NAME} has whole bounds only where type is number"
    yield from _object_counts(node)


def _object_counts(node: Node) -> Iterator[tuple[str, str]]:
    """Counted are the members of a map; beside named properties a count matters unless these settle it."""
    schema, active = node.schema, node.active
    needed = len(set(schema.get("required") or ()))
    named = schema.get("properties") or {}
    if active.get("minProperties", 0) > max(needed, 0 if named or needed else 1):
        yield "minProperties", f"{NAME} cannot tell a key that comes twice, and counts it twice"
    closed = schema.get("additionalProperties", "properties" not in schema) is False
    if "maxProperties" in active and (named or needed) and not (closed and len(named) <= active["maxProperties"]):
        yield "maxProperties", f"{NAME} ignores maxProperties beside named properties"


SUPPORT = Support(
    backend=NAME,
    keywords=_KEYWORDS,
    formats=frozenset(rx.FORMATS),
    beside={"pattern": frozenset({"format"})}
    | {key: frozenset({"format", "pattern"}) for key in ("minLength", "maxLength")},
    check=_check,
)
