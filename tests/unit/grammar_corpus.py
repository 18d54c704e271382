"""JSON schemas keyword by keyword, each with instances that satisfy it and instances that do not: for every backend.

An instance is written as `json.dumps` writes it, which is what `whitespace: compact` allows. Properties come in the
order of the schema. A backend must take the bytes of every valid instance (or refuse the schema), and must not take
those of an invalid one unless it reported the schema.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One schema; `valid` and `invalid` are JSON values."""

    name: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def text_of(instance: Any) -> bytes:
    """The compact form."""
    return json.dumps(instance, ensure_ascii=False).encode()


DRAFT7 = "http://json-schema.org/draft-07/schema#"
_AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
_CLOSED = {"additionalProperties": False}
_LIST = {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}} | _CLOSED}}


def _case(name: str, schema: Any, valid: list[Any], invalid: list[Any]) -> Case:
    return Case(name, schema, tuple(valid), tuple(invalid))


def _string(name: str, rule: dict[str, Any], valid: list[Any], invalid: list[Any]) -> Case:
    return _case(name, {"type": "string"} | rule, valid, invalid)


def _format(name: str, valid: list[str], invalid: list[str]) -> Case:
    return _string(f"format {name}", {"format": name}, valid, invalid)


_TYPES = (
    _case("type string", {"type": "string"}, ["", "a", 'q"\\\n', "é世"], [1, None, ["a"], {"a": "b"}]),
    _case("type integer", {"type": "integer"}, [0, -1, 12345678901], [1.5, "1", True]),
    _case("type number", {"type": "number"}, [0, -1.5, 1e30], ["1", None]),
    _case("type boolean", {"type": "boolean"}, [True, False], [None, 0]),
    _case("type null", {"type": "null"}, [None], [False, ""]),
    _case("type array", {"type": "array"}, [[], [1, "a"]], [{}, "a"]),
    _case("type object", {"type": "object"}, [{}, {"a": 1}], [[], "a"]),
    _case("type list", {"type": ["string", "null"]}, ["a", None], [1, []]),
    _case(
        "type list with keywords", {"type": ["string", "integer"], "minLength": 2, "minimum": 5}, ["ab", 7], ["a", 3]
    ),
    _case("any", {}, [None, 1, "a", [], {}], []),
    _case("true", True, [None, 1, "a", [], {}], []),
    _case("enum", {"enum": ["a", 1, None, [1], {"a": 1}]}, ["a", 1, None, [1], {"a": 1}], ["b", 2, []]),
    _case("enum beside type", {"type": "string", "enum": ["a", 1]}, ["a"], [1, "b"]),
    _case("enum beside maxLength", {"enum": ["a", "aaa"], "maxLength": 2}, ["a"], ["aaa"]),
    _case("const", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {}]),
    _case("const text", {"const": 'a"b\\c\né'}, ['a"b\\c\né'], ["a"]),
    _case("const with a null character", {"const": "a\0b"}, ["a\0b"], ["ab", "a"]),
    _case("enum of texts with quotes", {"enum": ['"', "\\", "/", "\t"]}, ['"', "\\", "/", "\t"], [""]),
)
_STRINGS = (
    _string("minLength", {"minLength": 2}, ["ab", "é世", "abc"], ["", "a", "é"]),
    _string("maxLength", {"maxLength": 2}, ["", "ab", "é世"], ["abc"]),
    _string("minLength and maxLength", {"minLength": 1, "maxLength": 2}, ["a", "ab"], ["", "abc"]),
    _string("lengths of escapes", {"minLength": 2, "maxLength": 2}, ['"\\', "\n\t"], ["\n", '"""']),
    _string("pattern", {"pattern": "^[a-c]+$"}, ["abc"], ["", "abd"]),
    _string("pattern without anchors", {"pattern": "bc"}, ["abcd", "bc"], ["b", "ac"]),
    _string("pattern with one anchor", {"pattern": "^ab"}, ["ab", "abc"], ["cab"]),
    _string("pattern with alternatives", {"pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    _string("pattern and maxLength", {"pattern": "^a+$", "maxLength": 2}, ["a", "aa"], ["aaa", "b"]),
    _string("pattern and minLength", {"pattern": "^a*$", "minLength": 2}, ["aa"], ["", "a"]),
    _string("pattern and format", {"pattern": "^2", "format": "date"}, ["2020-01-31"], ["1999-01-01", "2x"]),
    _string("pattern that needs escapes", {"pattern": '^["\\\\\\n]$'}, ['"', "\\", "\n"], ["a", ""]),
    _string("pattern with a null character", {"pattern": "^a\0b$"}, ["a\0b"], ["ab", "a"]),
    _string("pattern with control characters", {"pattern": "^a\\x00b\\u001f$"}, ["a\0b\x1f"], ["ab"]),
    _string("pattern with a class of control characters", {"pattern": "^a[\\x01-\\x02]b$"}, ["a\x01b"], ["ab"]),
    _string("pattern without control characters", {"pattern": "^a[^\\x00-\\x1f]b$"}, ["acb"], ["ab", "a\nb"]),
    _string("pattern with a dot", {"pattern": "^.$"}, ["a", "é", '"'], ["", "ab", "\n"]),
    _string("pattern with a negated class", {"pattern": "^[^a]$"}, ["b", '"', "世"], ["a", ""]),
    _string("pattern with classes", {"pattern": "^\\d\\w\\s$"}, ["1a "], ["aa ", "1- ", "1aa"]),
    _string("pattern with a lookahead", {"pattern": "^(?=a)[ab]$"}, ["a"], ["b"]),
    _string("pattern with a boundary", {"pattern": "^a\\b.b$"}, ["a b"], ["acb"]),
    _string("pattern with a backreference", {"pattern": "^(a|b)\\1$"}, ["aa"], ["ab"]),
    _string("pattern with counts", {"pattern": "^a{2,3}b{2}$"}, ["aabb", "aaabb"], ["abb", "aaaabb"]),
    _string("pattern with an optional group", {"pattern": "^a(bc+)?d$"}, ["ad", "abccd"], ["acd", "abd"]),
    _string("pattern with a group once at most", {"pattern": "^a(bc+){0,1}d$"}, ["ad", "abccd"], ["acd", "abd"]),
    _string("format and maxLength", {"format": "email", "maxLength": 5}, ["a@b.c"], ["abc@d.com"]),
    _case("minLength without type", {"minLength": 2}, ["ab"], ["a"]),
    _case("pattern without type", {"pattern": "^a$"}, ["a"], ["b"]),
)
_FORMATS = (
    _format("date", ["2024-02-28", "2024-12-31"], ["2024-13-01", "2024-02-30", "2023-02-29", "0000-01-01", "x"]),
    _format("time", ["10:20:30Z", "10:20:30.5+01:00"], ["25:00:00Z", "10:20:61Z", "10:20:300Z", "10:20:30+25:00", "x"]),
    _format("date-time", ["2024-02-28T10:20:30Z"], ["2024-02-28", "2024-02-30T10:20:30Z", "2024-02-28T25:20:30Z"]),
    _format("duration", ["P1D", "PT2H", "P1Y2M"], ["P", "1D", "P1S", "PT"]),
    _format("email", ["a@b.com", "a.b@c.org"], ["a"]),
    _format("idn-email", ["a@b.com"], ["a"]),
    _format("hostname", ["a.com", "a-b.c1"], ["-a.com", "a..b", "a b", "a-.com"]),
    _format("idn-hostname", ["a.com"], ["a b"]),
    _format("ipv4", ["1.2.3.4", "255.0.0.1"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    _format("ipv6", ["::1", "2001:db8::1"], ["1::2::3", "12345::", ":::"]),
    _format("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"]),
    _format("uri", ["http://a.b/c", "urn:x"], ["a b", "/a"]),
    _format("uri-reference", ["/a", "http://a.b"], ["a b", "\\a"]),
    _format("uri-template", ["/a/{b}"], ["/a/{b"]),
    _format("iri", ["http://é.b"], ["a b"]),
    _format("iri-reference", ["/é"], ["a b"]),
    _format("json-pointer", ["", "/a/b", "/a~0b"], ["a", "/a~b"]),
    _format("relative-json-pointer", ["0#", "1/a"], ["/a", "a"]),
    _format("regex", ["a+"], ["("]),
    _case("format without type", {"format": "ipv4"}, ["1.2.3.4"], ["x"]),
)
_NUMBERS = (
    _case("minimum", {"type": "integer", "minimum": 5}, [5, 17, 100], [4, 0, -7]),
    _case("maximum", {"type": "integer", "maximum": 5}, [5, 0, -100], [6, 10]),
    _case("minimum and maximum", {"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 20]),
    _case("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 5}, [6], [5, 0]),
    _case("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 5}, [4, -2], [5, 6]),
    _case("both minimums", {"type": "integer", "minimum": 5, "exclusiveMinimum": 7}, [8], [7, 6, 5]),
    _case("minimum of numbers", {"type": "number", "minimum": 0.5}, [0.5, 0.75, 2], [0.25, -1, 0]),
    _case("maximum of numbers", {"type": "number", "maximum": 1.5}, [1.5, 1, -3.25], [1.75, 2]),
    _case("range of numbers", {"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [1.5, -0.5, 2]),
    _case("exclusiveMinimum of numbers", {"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [0, -1, 0.0]),
    _case("exclusiveMaximum of numbers", {"type": "number", "exclusiveMaximum": 1}, [0.5, 0], [1, 1.0, 1.5]),
    _case("fractional minimum of integers", {"type": "integer", "minimum": 1.5}, [2, 3], [1, 0]),
    _case("large exponents", {"type": "number", "maximum": 10}, [9], [1e3]),
    _case("multipleOf", {"type": "integer", "multipleOf": 3}, [0, 3, 9], [1, 4]),
    _case("multipleOf of numbers", {"type": "number", "multipleOf": 0.5}, [0.5, 2], [0.25]),
    _case("minimum without type", {"minimum": 5}, [7], [3]),
)
_ARRAYS = (
    _case("items", {"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2]], [["a"], [1, None]]),
    _case("items false", {"type": "array", "items": False}, [[]], [[1]]),
    _case("minItems", {"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    _case("maxItems", {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    _case("maxItems without items", {"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    _case(
        "prefixItems", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [["a"]]
    ),
    _case("prefixItems may be fewer", {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, [[1, 2]], [[2]]),
    _case(
        "prefixItems and items",
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}},
        [[1, 2]],
        [[1, 1]],
    ),
    _case(
        "prefixItems, items false", {"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1]], [[1, 2]]
    ),
    _case("prefixItems and minItems", {"type": "array", "prefixItems": [{"const": 1}], "minItems": 2}, [[1, 5]], [[1]]),
    _case(
        "prefixItems and maxItems", {"type": "array", "prefixItems": [{"const": 1}] * 2, "maxItems": 1}, [[1]], [[1, 1]]
    ),
    _case(
        "items list of draft 7",
        {"$schema": DRAFT7, "type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
        [[1], [1, 2]],
        [[2], [1, 1]],
    ),
    _case("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    _case("uniqueItems of one at most", {"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    _case("contains", {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}}, [[1, 5]], [[], [1]]),
    _case("maxContains", {"type": "array", "contains": {"const": 5}, "maxContains": 1}, [[5]], [[5, 5]]),
    _case(
        "unevaluatedItems", {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1]], [[1, 2]]
    ),
    _case("items without type", {"items": {"type": "integer"}}, [[1]], [["a"]]),
    _case("minItems without type", {"minItems": 1}, [[1]], [[]]),
)
_OBJECTS = (
    _case("properties", _AB, [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}], [{"a": "x"}, {"b": 1}, {"a": 1, "b": 2}]),
    _case("a key twice", _AB, [{"a": 1}], [{"a": 1, "c": 2, "a ": 3, "b": 4}]),
    _case("required", _AB | {"required": ["b"]}, [{"b": "x"}, {"a": 1, "b": "x"}], [{}, {"a": 1}]),
    _case("required and closed", _AB | {"required": ["a"]} | _CLOSED, [{"a": 1}], [{}, {"b": "x"}, {"a": 1, "c": 1}]),
    _case("required, not in properties", {"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    _case("required beside properties", _AB | {"required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    _case("additionalProperties false", _AB | _CLOSED, [{}, {"a": 1}], [{"c": 1}, {"a": 1, "c": 1}]),
    _case("nothing allowed", {"type": "object"} | _CLOSED, [{}], [{"a": 1}]),
    _case("additionalProperties", _AB | {"additionalProperties": {"type": "boolean"}}, [{"c": True}], [{"c": 1}]),
    _case(
        "additional after properties",
        _AB | {"additionalProperties": {"const": 1}},
        [{"a": 5, "c": 1}],
        [{"a": 1, "c": 2}],
    ),
    _case("map", {"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "a"}]),
    _case(
        "patternProperties",
        {"type": "object", "patternProperties": {"^s": {"const": 1}}} | _CLOSED,
        [{"sx": 1}],
        [{"sx": 2}],
    ),
    _case(
        "patternProperties and others",
        {"type": "object", "patternProperties": {"^s": {"const": 1}}},
        [{"s": 1}],
        [{"s": 2}],
    ),
    _case(
        "patternProperties and properties",
        _AB | {"patternProperties": {"^a": {"minimum": 5}}},
        [{"a": 7}],
        [{"a": 1}, {"ab": 1}],
    ),
    _case("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    _case("propertyNames by length", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    _case("propertyNames beside properties", _AB | {"propertyNames": {"enum": ["b"]}}, [{"b": "x"}], [{"a": 1}]),
    _case("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    _case("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    _case(
        "minProperties beside properties", _AB | {"minProperties": 2} | _CLOSED, [{"a": 1, "b": "x"}], [{}, {"a": 1}]
    ),
    _case("maxProperties beside properties", _AB | {"maxProperties": 1} | _CLOSED, [{"a": 1}], [{"a": 1, "b": "x"}]),
    _case(
        "maxProperties below required", _AB | {"required": ["a"], "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": "x"}]
    ),
    _case("dependentRequired", _AB | {"dependentRequired": {"a": ["b"]}}, [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}]),
    _case("dependentSchemas", _AB | {"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": "x"}], [{"a": 1}]),
    _case("dependencies of draft 7", _AB | {"$schema": DRAFT7, "dependencies": {"a": ["b"]}}, [{"b": "x"}], [{"a": 1}]),
    _case("unevaluatedProperties", _AB | {"unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
    _case(
        "unevaluatedProperties over allOf",
        {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"a": 1, "c": 1}],
    ),
    _case("properties without type", {"properties": {"a": {"type": "integer"}}}, [{"a": 1}], [{"a": "x"}]),
    _case("required without type", {"required": ["a"]}, [{"a": 1}], [{}]),
    _case("a property that is never valid", _AB | {"properties": {"a": False}}, [{}], [{"a": 1}]),
    _case(
        "keys with quotes",
        {"type": "object", "properties": {'a"\\é\n': {"const": 1}}} | _CLOSED,
        [{'a"\\é\n': 1}],
        [{"a": 1}],
    ),
)
_COMBINED = (
    _case("anyOf", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
    _case("anyOf beside type", {"type": "string", "anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a"], [1]),
    _case("anyOf beside minLength", {"minLength": 2, "anyOf": [{"type": "string"}]}, ["ab"], ["a"]),
    _case(
        "anyOf of required",
        _AB | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "x"}],
        [{}, {"a": "x"}],
    ),
    _case("oneOf, disjoint", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None]),
    _case("oneOf, overlapping", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1]),
    _case(
        "oneOf with a discriminator",
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, name: {"type": "integer"}}, "required": ["k"]}
                | _CLOSED
                for name in "ab"
            ]
        },
        [{"k": "a", "a": 1}, {"k": "b"}],
        [{"k": "a", "b": 1}, {"k": "c"}],
    ),
    _case("allOf of one", {"allOf": [{"type": "integer", "minimum": 5}]}, [5], [4]),
    _case("allOf", {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 7}]}, [5, 7], [4, 8]),
    _case(
        "allOf of objects",
        {
            "allOf": [
                _AB | {"required": ["a"]},
                {"type": "object", "properties": {"c": {"const": 1}}, "required": ["c"]},
            ]
        },
        [{"a": 1, "c": 1}],
        [{"a": 1}, {"c": 1}, {"a": 1, "c": 2}],
    ),
    _case("allOf beside type", {"type": "integer", "allOf": [{"minimum": 5}]}, [5], [4, "a"]),
    _case("not", {"type": "string", "not": {"const": "a"}}, ["b"], ["a"]),
    _case("not anything", {"type": "object", "properties": {"a": {"not": {}}}}, [{}], [{"a": 1}]),
    _case("if then", {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, [1, 6], [8]),
    _case("if else", {"type": "integer", "if": {"minimum": 5}, "else": {"maximum": 3}}, [3, 8], [4]),
)
_REFERENCES = (
    _case("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
    _case("$ref and siblings", {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}}, [5], [6]),
    _case(
        "$ref and siblings in draft 7",
        {"$schema": DRAFT7, "$ref": "#/definitions/a", "maximum": 5, "definitions": {"a": {"type": "integer"}}},
        [5, 6],
        ["a"],
    ),
    _case(
        "$ref in a property",
        _AB | {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"const": 1}}},
        [{"a": 1}],
        [{"a": 2}],
    ),
    _case(
        "$ref to a property",
        _AB | {"properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}},
        [{"b": 1}],
        [{"b": 2}],
    ),
    _case("$ref with escapes", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, [1], [2]),
    _case("$anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, [1], [2]),
    _case("$ref by $id", {"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": {"const": 1}}}, [1], [2]),
    _case("recursion", {"$ref": "#/$defs/node"} | _LIST, [{}, {"next": {"next": {}}}], [{"next": 1}, {"x": 1}]),
    _case("recursion to the root", {"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1], {}]),
    _case(
        "$ref through $ref", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 1}}}, [1], [2]
    ),
    _case("$dynamicRef", {"$dynamicRef": "#d", "$defs": {"a": {"$dynamicAnchor": "d", "const": 1}}}, [1], [2]),
)
_NESTED = (
    _case("in an array", {"type": "array", "items": {"type": "string", "maxLength": 1}}, [["a"]], [["ab"]]),
    _case(
        "in a map",
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1}},
        [{"x": "a"}],
        [{"x": "ab"}],
    ),
    _case("in anyOf", {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, ["a", None], ["ab"]),
    _case(
        "a nested map of lists",
        {"type": "object", "additionalProperties": {"items": {"const": 1}, "type": "array"}},
        [{"a": [1]}],
        [{"a": [2]}],
    ),
    _case("an unknown keyword", {"type": "string", "maximumLength": 2}, ["a"], []),
)

CASES: tuple[Case, ...] = (
    *_TYPES,
    *_STRINGS,
    *_FORMATS,
    *_NUMBERS,
    *_ARRAYS,
    *_OBJECTS,
    *_COMBINED,
    *_REFERENCES,
    *_NESTED,
)
