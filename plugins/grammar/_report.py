"""What a backend would let pass of a JSON schema: a walk over the schema beside a table of what the backend enforces.

A backend declares one `Support` and answers `unenforced` of a constraint with

    SUPPORT = Support(backend="mine", keywords=frozenset({"type", "properties", ...}), formats=frozenset({"date"}), ...)
    return unenforced(json.loads(constraint.value), SUPPORT)

The walk knows drafts 7 and 2020-12 (`$schema` decides, 2020-12 is the default): which keywords are annotations, which
cannot matter (`minLength` where `type` is integer, `uniqueItems: false`, `then` without `if`), what lies where, and
follows references. It visits every schema that can matter once, so its time is linear in the size of the schema, but
for `oneOf`, whose branches are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phloem.constraint import Unenforced

from ._disjoint import TYPES, overlapping, type_of, types_of, values_of
from ._refs import References, escape

# Keywords by the one type of value that they judge; all others judge any value.
JUDGES: dict[str, str] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("items", "items[]", "prefixItems", "additionalItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("required", "propertyNames", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
}
ANY_VALUE = frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"}
)
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions", "discriminator"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "xml", "externalDocs"}
)
# Where schemas lie in a schema: as the value itself, in a list, or as the values of an object.
_ONE = ("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties")
_ONE_MORE = ("propertyNames", "not", "if", "then", "else")
_LIST = ("items[]", "prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
# Values with which a keyword forbids nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties"), (0,)),
    **dict.fromkeys(("items", "additionalItems", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames"), (True, {})),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), ({},)
    ),
    **{"required": ([],), "uniqueItems": (False,), "pattern": ("", ".*", "^.*$"), "allOf": ([],), "items[]": ([],)},
    **{"prefixItems": ([],), "not": (False,)},
    # Of pydantic and OpenAPI: hints for forms and for decoding, which forbid no string.
    "format": ("binary", "password", "path", "file-path", "directory-path", "multi-line"),
}
# A keyword that does nothing without another one.
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_SHAPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("minContains", "maxContains"), int),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef"), str),
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf", "required", "enum", "items[]"), list),
    **dict.fromkeys((*_NAMED, "dependentRequired"), dict),
    **dict.fromkeys((*_ONE, *_ONE_MORE), (dict, bool)),
    **{"type": (str, list), "uniqueItems": bool},
}
_TYPE_NAMES = sorted(TYPES)


def misshapen(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords of one schema that have a value of the wrong kind, and why: what no backend can read."""
    for key, value in schema.items():
        keyword = "items[]" if key == "items" and isinstance(value, list) else key
        shape = _SHAPES.get(keyword)
        if shape is not None and (
            not isinstance(value, shape) or (isinstance(value, bool) and shape in (int, (int, float)))
        ):
            yield key, f"{keyword} has a value of the wrong type: {type_of(value)}"
        elif keyword == "type":
            unknown = [one for one in ([value] if isinstance(value, str) else value) if one not in _TYPE_NAMES]
            if unknown or not value:
                yield key, f"{unknown[0] if unknown else 'an empty list'} is no type; {', '.join(_TYPE_NAMES)} are"
        elif shape is int and value < 0:
            yield key, f"{keyword} must not be negative"


class Malformed(Unenforced):
    """A place that no backend can read, whatever the request allows."""


class Node(NamedTuple):
    """One schema on the walk, as `Support.check` sees it."""

    schema: dict[str, Any]
    pointer: str  # "#/properties/id"
    types: frozenset[str]  # what a value may be, by type, const and enum; all seven where these are absent
    active: Mapping[str, Any]  # keywords that can forbid something here; a list of `items` is called "items[]"
    references: References


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a backend enforces. A keyword that is in none of the fields is reported wherever it can forbid something.

    `Unenforced.why` says "<backend> ignores <keyword>", with the reason where there is one.
    """

    backend: str
    keywords: frozenset[str]  # enforced keywords; "items[]" is draft 7's list of items
    formats: frozenset[str] = frozenset()  # enforced values of `format`, which is not in `keywords`
    typed: frozenset[str] = frozenset()  # of `keywords`: enforced only where `type` says what the keyword judges
    beside: Mapping[str, frozenset[str]] = field(default_factory=dict)  # keyword: what makes the backend ignore it
    ref_siblings: bool = False  # keywords beside `$ref` are enforced (draft 7 says that they mean nothing)
    union_siblings: bool = False  # keywords beside `anyOf`, `oneOf` and `allOf` are enforced
    value_siblings: bool = False  # keywords beside `const` and `enum` are enforced; `type` is judged by the walk
    exclusive: bool = False  # `oneOf` is exactly one; else it is taken for `anyOf` and reported if branches overlap
    check: Callable[[Node], Iterator[tuple[str, str]]] | None = None  # more: (keyword, why) for one schema


def unenforced(schema: Any, support: Support, pointer: str = "#") -> list[Unenforced]:
    """What of a schema the backend would let pass, in the order of the walk; [] where it enforces all.

    `pointer`: where the schema lies in what the user gave, for schemas inside a structural tag. What cannot be read
    at all, a value of the wrong type or a reference to nothing, is reported too, as `Malformed`. Called once per
    constraint, where it is compiled.
    """
    return list(_Walk(schema, support, pointer).run())


class _Walk:
    """Depth first, without recursion: a schema may be nested as deep as its text allows."""

    def __init__(self, root: Any, support: Support, pointer: str) -> None:
        self.support, self.prefix, self.references = support, pointer, References(root)
        version = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.old = any(f"draft-0{number}" in version for number in (3, 4, 6, 7))
        self.todo: list[tuple[Any, str]] = [(root, "#")]
        self.seen: set[int] = set()

    def run(self) -> Iterator[Unenforced]:
        while self.todo:
            schema, pointer = self.todo.pop()
            if isinstance(schema, bool) or id(schema) in self.seen:
                continue
            self.seen.add(id(schema))
            if not isinstance(schema, dict):
                yield self._found(pointer, "", "is no schema: neither an object nor true or false", Malformed)
                continue
            node = self._node(schema, pointer)
            wrong = dict(misshapen(node.active)) | self._dangling(node)
            yield from (self._found(pointer, keyword, why, Malformed) for keyword, why in wrong.items())
            for keyword, why in self._judge(node, wrong):
                yield self._found(pointer, keyword, why)
            self.todo += reversed(list(self._inside(node)))

    def _found(self, pointer: str, keyword: str, why: str, kind: type[Unenforced] = Unenforced) -> Unenforced:
        at = f"{pointer}/{keyword.removesuffix('[]')}" if keyword else pointer
        return kind(self.prefix + at[1:], why)

    def _dangling(self, node: Node) -> dict[str, str]:
        """A reference to nothing."""
        name = node.active.get("$ref")
        lost = isinstance(name, str) and self.references.resolve(name) is None
        return {"$ref": f"{name!r} is nothing in this schema"} if lost else {}

    def _node(self, schema: dict[str, Any], pointer: str) -> Node:
        if self.old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        kind = schema.get("type", "")
        well_typed = isinstance(kind, str) or (isinstance(kind, list) and all(isinstance(one, str) for one in kind))
        types = types_of(schema) if well_typed else TYPES
        active = {}
        for key, value in schema.items():
            keyword = "items[]" if key == "items" and isinstance(value, list) else key
            judged = {JUDGES.get(keyword)} | ({"integer"} if JUDGES.get(keyword) == "number" else set())
            idle = any(value == no and type(value) is type(no) for no in _IDLE.get(keyword, ()))
            lone = _NEEDS.get(keyword, key) not in schema
            lone = lone or (keyword == "additionalItems" and not isinstance(schema.get("items"), list))
            lone = lone or (keyword == "if" and not {"then", "else"} & schema.keys())
            if not idle and not lone and (keyword not in JUDGES or judged & types):
                active[keyword] = value
        return Node(schema, pointer, types, active, self.references)

    def _judge(self, node: Node, wrong: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """What is not enforced of the keywords that can be read."""
        for keyword, value in node.active.items():
            if keyword in ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword not in wrong and (why := self._why(node, keyword, value)) is not None:
                yield keyword, why
        if self.support.check is not None:
            yield from self.support.check(node)

    def _why(self, node: Node, keyword: str, value: Any) -> str | None:
        """Why a keyword of a schema is not enforced; None if it is."""
        support, name = self.support, self.support.backend
        if keyword not in JUDGES and keyword not in ANY_VALUE:
            return f"{name} does not know the keyword {keyword}"
        if keyword == "format":
            if value not in support.formats:
                return f"{name} ignores the format {value!r}"
        elif keyword == "oneOf" and not support.exclusive and keyword in support.keywords:
            pair = overlapping(value, self.references) if len(value) <= 100 else (0, len(value) - 1)
            if pair is not None:
                return f"{name} takes oneOf for anyOf, and branches {pair[0]} and {pair[1]} may both hold"
        elif keyword not in support.keywords:
            return f"{name} ignores {keyword}"
        lost = [other for other in support.beside.get(keyword, ()) if other in node.active]
        if lost:
            return f"{name} ignores {keyword} beside {lost[0]}"
        if keyword in support.typed and node.schema.get("type") not in _named(keyword):
            return f"{name} ignores {keyword} where type is not {_named(keyword)[0]}"
        return self._sibling(node, keyword)

    def _sibling(self, node: Node, keyword: str) -> str | None:
        """A keyword beside one that says all for the backend."""
        support = self.support
        values = values_of(node.schema)
        if values is not None and keyword == "type":
            wrong = [value for value in values if type_of(value) not in node.types]
            return f"{support.backend} ignores type beside enum, and {wrong[0]!r} is of another" if wrong else None
        rest = {"allOf", "anyOf", "oneOf"}
        for heads, enforced in (
            ({"$ref", "$dynamicRef"}, support.ref_siblings),
            ({"const", "enum"}, support.value_siblings),
            (rest, support.union_siblings),
        ):
            beside = sorted(heads & node.active.keys() - {keyword})
            if beside and not enforced:
                return f"{support.backend} ignores {keyword} beside {beside[0]}"
        return None

    def _inside(self, node: Node) -> Iterator[tuple[Any, str]]:
        """The schemas that a value, or a part of it, may have to satisfy."""
        at = node.pointer
        for key in ("$ref", "$dynamicRef"):
            place = self.references.resolve(node.active.get(key))
            if place is not None:
                yield place
        for key, value in node.active.items():
            name = key.removesuffix("[]")
            if key in _ONE or key in _ONE_MORE:
                yield value, f"{at}/{key}"
            elif key in _LIST and isinstance(value, list):
                yield from ((item, f"{at}/{name}/{i}") for i, item in enumerate(value))
            elif key in _NAMED and isinstance(value, dict):
                named = ((item, f"{at}/{key}/{escape(item_name)}") for item_name, item in value.items())
                yield from (pair for pair in named if key != "dependencies" or not isinstance(pair[0], list))


def _named(keyword: str) -> tuple[str, ...]:
    """Values of `type` that name what a keyword judges."""
    judged = JUDGES[keyword]
    return ("number", "integer") if judged == "number" else (judged,)
