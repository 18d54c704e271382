"""JSON schemas for llguidance: how JSON is written, formats made exact, and what the library would let pass."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError

from . import _tags
from ._report import Node, Support, unenforced

WHITESPACE = r"[ \n\r\t]{1,4}"  # the most at one place under `flexible`
MAX_DEPTH = 100  # of values within values: the library's own limit is 127
# No \u: an escaped letter would let an additional property bear the name of a declared one, whose schema it escapes.
_ESCAPES = 'nrbtf\\"'
_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
_DATE = ("^0{0,3}[1-9]", f"^[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))|^(?:{_YEAR})-02-29")
# The library's dates have a 29 February in every year and a year 0, its times a second 60 in every minute.
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "date": _DATE,
    "date-time": (*_DATE, "^.{11}[0-9]{2}:[0-9]{2}:[0-5]"),
    "time": ("^[0-9]{2}:[0-9]{2}:[0-5]",),
}
_DATA = ("enum", "const", "default", "examples")  # keywords whose values are no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _more(node: Node) -> Iterator[tuple[str, str]]:
    """Additional properties may repeat, so that two texts `"x": 1` count as two properties."""
    least, required = node.active.get("minProperties"), node.active.get("required", ())
    if isinstance(least, int) and isinstance(required, (list, tuple)) and least - len(set(map(str, required))) > 1:
        yield "minProperties", "llguidance counts an additional property twice if it is repeated"


SUPPORT = Support(
    backend="llguidance",
    keywords=frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
    | {"minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"items", "items[]", "additionalItems", "prefixItems", "minItems", "maxItems"}
    | {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"},
    formats=frozenset({*_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}),
    ref_siblings=True,
    union_siblings=True,
    value_siblings=True,
    check=_more,
)


def report(constraint: Constraint) -> list[Unenforced]:
    """By the table above, for every schema in a constraint but those in a Lark grammar, where the library is strict."""
    if constraint.kind == "json_schema":
        return unenforced(json.loads(constraint.value), SUPPORT)
    if constraint.kind == "structural_tag":
        tree, at = _tags.parse_at(constraint.value)
        return [found for pointer, schema in _tags.schemas(tree, at) for found in unenforced(schema, SUPPORT, pointer)]
    return []


def json_rule(schema: Any, constraint: Constraint) -> str:
    """A schema as a part of a rule. A key `x-guidance` of the user's, which would change whitespace, is dropped."""
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema is an object, true or false", param=constraint.kind)
    fields = {"allOf": [schema]} if isinstance(schema, bool) else _exact(schema, 0, constraint.kind)
    return "%json " + json.dumps({**fields, "x-guidance": json_options(constraint)}, ensure_ascii=False)


def json_options(constraint: Constraint) -> dict[str, Any]:
    """How JSON is written. `lenient` leaves out what cannot be enforced; that, and any `oneOf`, `report` has judged."""
    lenient = not constraint.strict and constraint.kind != "lark"
    options = {"lenient": lenient, "coerce_one_of": constraint.kind != "lark", "json_allowed_escapes": _ESCAPES}
    if constraint.whitespace == "flexible":
        return options | {"whitespace_pattern": WHITESPACE}
    return options | {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def _exact(schema: Any, depth: int, kind: str) -> Any:
    """The schema with patterns beside formats that the library takes too widely."""
    if depth > MAX_DEPTH:
        raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH}", param=kind)
    if isinstance(schema, list):
        return [_exact(item, depth + 1, kind) for item in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {
        key: value
        if key in _DATA
        else {name: _exact(item, depth + 2, kind) for name, item in value.items()}
        if key in _NAMED and isinstance(value, dict)
        else _exact(value, depth + 1, kind)
        for key, value in schema.items()
    }
    patterns = _FORMATS.get(schema["format"], ()) if isinstance(schema.get("format"), str) else ()
    if patterns and isinstance(exact.get("allOf", []), list):
        exact["allOf"] = [*exact.get("allOf", []), *({"pattern": pattern} for pattern in patterns)]
    return exact
