"""JSON schemas for llguidance: how JSON is written, formats made exact, and what the library would let pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from phloem.constraint import Constraint
from phloem.errors import RequestError

from ._report import Node, Support
from ._width import bounded

WHITESPACE = r"[ \n\r\t]{1,4}"  # the most at one place under `flexible`
MAX_OPTIONAL = 800  # optional properties of one object: each is four items of a row that a mask walks, in 30 ms
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
# The library drops characters from a pattern that it cannot write, and takes the rest: `^a\x00b$` for "ab".
_CONTROL = re.compile(r"\\(?:x|u00)(?!0[89aAcCdD])(?:[01][0-9a-fA-F]|7[fF])")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_ONLY_CONTROLS = re.compile(rf"\[(?:{_CONTROL.pattern}|-)+\]")
_DATA = ("enum", "const", "default", "examples")  # keywords whose values are no schemas
_IDLE: Mapping[str, tuple[Any, ...]] = {  # values with which a keyword that the library refuses forbids nothing
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "propertyNames"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **{"uniqueItems": (False,), "not": (False,)},
}
_BESIDE_REFERENCE = ("$ref", "$schema", "$id", "id", "$defs", "definitions")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _spelled(pattern: str) -> str:
    """A pattern with its escapes of control characters as these; without classes, whose other characters remain."""
    pattern = _CLASS.sub(lambda one: one[0] if _ONLY_CONTROLS.fullmatch(one[0]) else "", pattern.replace("\\\\", ""))
    return _CONTROL.sub("\0", pattern)


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


def json_rule(schema: Any, constraint: Constraint) -> str:
    """A schema as a part of a rule. A key `x-guidance` of the user's, which would change whitespace, is dropped."""
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema is an object, true or false", param=constraint.kind)
    fields = {"allOf": [schema]} if isinstance(schema, bool) else _Rewriter(schema, constraint.kind).schema(schema)
    return "%json " + json.dumps({**fields, "x-guidance": json_options(constraint)}, ensure_ascii=False)


def json_options(constraint: Constraint) -> dict[str, Any]:
    """How JSON is written. `lenient` leaves out what cannot be enforced; that, and any `oneOf`, `report` has judged."""
    lenient = not constraint.strict and constraint.kind != "lark"
    options = {"lenient": lenient, "coerce_one_of": constraint.kind != "lark", "json_allowed_escapes": _ESCAPES}
    if constraint.whitespace == "flexible":
        return options | {"whitespace_pattern": WHITESPACE}
    return options | {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class _Rewriter:
    """A schema in the words that the library takes, with the meaning it has."""

    def __init__(self, root: dict[str, Any], kind: str) -> None:
        self.kind = kind
        version = str(root.get("$schema", ""))
        self.old = any(f"draft-0{number}" in version for number in (3, 4, 6, 7))

    def any(self, value: Any, depth: int = 0) -> Any:
        """Whatever lies where schemas lie."""
        if depth > MAX_DEPTH:
            raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH}", param=self.kind)
        if isinstance(value, list):
            return [self.any(item, depth + 1) for item in value]
        return self.schema(value, depth) if isinstance(value, dict) else value

    def schema(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        """One schema: what is idle left out, formats made exact."""
        exact: dict[str, Any] = {}
        if isinstance(schema.get("properties"), dict) and isinstance(schema.get("required", []), list):
            optional = len(schema["properties"].keys() - set(map(str, schema.get("required", []))))
            if optional > MAX_OPTIONAL:
                why = f"an object has {optional} optional properties; llguidance is slow beyond {MAX_OPTIONAL}"
                raise RequestError(why, hint="require some of them", param=self.kind)
        for key, value in schema.items():
            if self._is_idle(key, value, schema):
                continue
            if key in ("const", "enum", "required") or (key == "properties" and isinstance(value, dict)):
                self._check_written(list(value) if key == "properties" else value)
            if key == "pattern" and isinstance(value, str):
                self._check_written(_spelled(value))
                bounded(value, self.kind)
            if key in _NAMED and isinstance(value, dict):
                exact[key] = {name: self.any(item, depth + 2) for name, item in value.items()}
            else:
                exact[key] = value if key in _DATA else self.any(value, depth + 1)
        patterns = _FORMATS.get(str(schema.get("format")), ())
        if patterns and isinstance(exact.get("allOf", []), list):
            exact["allOf"] = [*exact.get("allOf", []), *({"pattern": pattern} for pattern in patterns)]
        return exact

    def _check_written(self, value: Any) -> None:
        """Raises RequestError for a text in a value that would never be written."""
        written = json.dumps(value, ensure_ascii=False).replace(r"\\", "")
        if r"\u00" in written or "\x7f" in written:
            why = r"a value has a control character, which llguidance would have to write as \u00.."
            raise RequestError(why, hint="leave it out, or choose another backend", param=self.kind)

    def _is_idle(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """True if a keyword means nothing here; in old drafts what stands beside a reference does not."""
        if any(value == idle and type(value) is type(idle) for idle in _IDLE.get(key, ())):
            return True
        if key in ("then", "else") and "if" not in schema:
            return True
        return self.old and "$ref" in schema and key not in _BESIDE_REFERENCE
