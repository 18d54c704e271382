"""Schemas as people send them: what pydantic, zod and OpenAI's strict tools write, each with documents that are valid.

`invalid` are documents that the schema forbids. Properties come in the order of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grammar_corpus import Case

CLOSED = {"additionalProperties": False}
ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DATE = (
    "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
    "\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"
    "(?:02)-(?:0[1-9]|1\\d|2[0-8])))$"
)
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
UUID = "123e4567-e89b-42d3-a456-426614174000"


def model(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """An object as pydantic describes it: titles, and no word of other properties."""
    named = {name: {"title": name.title(), **schema} for name, schema in properties.items()}
    return {"title": "Model", "type": "object", "properties": named, "required": list(required or properties), **more}


def one(name: str, schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> Case:
    """A model of one field."""
    wrapped = model({"x": schema}, **({"$defs": schema.pop("$defs")} if "$defs" in schema else {}))
    return Case(name, wrapped, tuple({"x": value} for value in valid), (*({"x": value} for value in invalid), {}))


def whole(name: str, schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> Case:
    return Case(name, schema, tuple(valid), tuple(invalid))


def _pydantic() -> Iterator[Case]:
    text, whole_number = {"type": "string"}, {"type": "integer"}
    yield one("str with lengths", text | {"minLength": 2, "maxLength": 5}, ["ab", "abcde", "é世"], ["a", "abcdef", 1])
    yield one("str with a pattern", text | {"pattern": r"^[A-Z]{2}-\d{3}$"}, ["AB-123"], ["ab-123", "AB-12", "AB-1234"])
    yield one(
        "str with a pattern and lengths",
        text | {"pattern": "^[a-z0-9]+(?:-[a-z0-9]+)*$", "minLength": 3, "maxLength": 8},
        ["abc", "a-b", "ab-cd-ef", "abcdefgh"],
        ["ab", "a-", "abcd-efgh", "-abc", "a--b"],
    )
    yield one(
        "str that begins so", text | {"pattern": "^id_", "maxLength": 6}, ["id_", "id_abc"], ["id", "id_abcd", "x"]
    )
    yield one("int with bounds", whole_number | {"minimum": 1, "maximum": 100}, [1, 42, 100], [0, 101, -5, 1.5])
    yield one("positive int", whole_number | {"exclusiveMinimum": 0}, [1, 10**6], [0, -1])
    yield one("int of a step", whole_number | {"multipleOf": 5}, [0, 5, -10, 125], [1, 12, 7])
    yield one("float from 0 to 1", {"type": "number", "minimum": 0.0, "maximum": 1.0}, [0, 0.5, 1, 0.125], [1.5, -0.1])
    yield one("float above 0.01", {"type": "number", "exclusiveMinimum": 0.01}, [0.02, 1, 99.5], [0.01, 0.001, 0])
    yield one("a price", {"type": "number", "minimum": 0, "multipleOf": 0.25}, [0, 19.75, 5.5, 100], [1.999, -1])
    yield one("date", text | {"format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01"])
    yield one("time", text | {"format": "time"}, ["10:20:30Z", "23:59:59+02:00"], ["24:00:00Z", "10:20"])
    yield one(
        "datetime", text | {"format": "date-time"}, ["2024-02-28T10:20:30Z"], ["2024-02-28", "2024-02-30T10:20:30Z"]
    )
    yield one("timedelta", text | {"format": "duration"}, ["P3D", "PT1H30M"], ["3D", "P"])
    yield one("EmailStr", text | {"format": "email"}, ["a.b+c@mail.example.com"], ["ab.de", "ab"])
    yield one("UUID", text | {"format": "uuid"}, [UUID], [UUID[:-1], "x"])
    yield one("IPv4Address", text | {"format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"])
    yield one(
        "AnyUrl", text | {"format": "uri", "minLength": 1}, ["https://example.com/a?b=c#d"], ["example.com", "a b"]
    )
    yield one(
        "HttpUrl",
        text | {"format": "uri", "minLength": 1, "maxLength": 2083},
        ["https://example.com/a?b=c#d", "http://localhost:8080"],
        ["example.com", "https://a.b/" + "c" * 2100],
    )
    yield one(
        "Decimal",
        {"anyOf": [{"type": "number"}, text | {"pattern": PYDANTIC_DECIMAL}]},
        [1.5, "12.50", "-3"],
        ["", "a", "."],
    )
    yield one(
        "list with counts",
        {"type": "array", "items": text, "minItems": 1, "maxItems": 2},
        [["a"], ["a", "b"]],
        [[], ["a"] * 3],
    )
    yield one("Literal", {"const": "cat", "type": "string"}, ["cat"], ["dog"])
    yield one(
        "Enum",
        {"$ref": "#/$defs/C", "$defs": {"C": {"enum": ["r", "g"], "title": "C", "type": "string"}}},
        ["r", "g"],
        ["b", 1],
    )
    yield one("Literal of numbers", {"enum": [1, 2], "type": "integer"}, [1, 2], [3, "1"])
    yield one("Optional", {"anyOf": [whole_number, {"type": "null"}], "default": None}, [1, None], ["1"])
    yield whole(
        "optional properties",
        model({"a": text, "b": whole_number, "c": {"type": "boolean"}}, "b"),
        [{"a": "x", "b": 1, "c": True}, {"b": 1}, {"b": 1, "c": False}],
        [{}, {"a": "x"}, {"b": "1"}],
    )
    yield one(
        "a nested model",
        {"$ref": "#/$defs/P", "$defs": {"P": model({"x": whole_number, "y": whole_number})}},
        [{"x": 1, "y": 2}],
        [{"x": 1}, {"x": "1", "y": 2}],
    )
    node = model({"value": text, "children": {"type": "array", "items": {"$ref": "#/$defs/N"}}}, "value")
    yield whole(
        "a tree",
        {"$defs": {"N": node}, "$ref": "#/$defs/N"},
        [{"value": "a"}, {"value": "a", "children": [{"value": "b", "children": []}]}],
        [{"children": []}, {"value": "a", "children": [{}]}],
    )
    cat = model({"kind": {"const": "cat", "type": "string"}, "lives": whole_number})
    dog = model({"kind": {"const": "dog", "type": "string"}, "name": text})
    mapping = {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}
    yield one(
        "a union with a discriminator",
        {
            "discriminator": mapping,
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {"Cat": cat, "Dog": dog},
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}],
        [{"kind": "dog", "lives": 9}, {"kind": "cow"}],
    )
    yield one(
        "a union", {"anyOf": [whole_number, text, {"type": "array", "items": text}]}, [1, "a", ["a"]], [None, [1]]
    )
    yield one(
        "allOf of one",
        {"allOf": [{"$ref": "#/$defs/P"}], "description": "d", "$defs": {"P": model({"x": text})}},
        [{"x": "a"}],
        [{}],
    )
    yield one(
        "a tuple",
        {"type": "array", "prefixItems": [whole_number, text], "minItems": 2, "maxItems": 2},
        [[1, "a"]],
        [[1], ["a", 1], [1, "a", 2]],
    )
    yield one(
        "dict[str, int]", {"type": "object", "additionalProperties": whole_number}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]
    )
    yield one(
        "dict of keys with a pattern",
        {"type": "object", "patternProperties": {"^x_": whole_number}, "additionalProperties": False},
        [{}, {"x_a": 1}],
        [{"x_a": "b"}, {"y": 1}],
    )
    yield one(
        "dict of literal keys",
        {"type": "object", "additionalProperties": whole_number, "propertyNames": {"enum": ["a", "b"]}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    )
    yield whole("forbidden extras", model({"a": text}, **CLOSED), [{"a": "b"}], [{"a": "b", "c": 1}, {}])
    yield whole(
        "allowed extras", model({"a": text}, additionalProperties=True), [{"a": "b"}, {"a": "b", "c": [1]}], [{}]
    )
    yield one("Any", {}, [None, 1, {"a": [1]}], [])
    yield one(
        "with examples", text | {"default": "a", "examples": ["b"], "description": "c", "deprecated": True}, ["z"], [1]
    )
    yield one("bytes", text | {"format": "binary"}, ["abc"], [1])
    yield one("Path", text | {"format": "path"}, ["/tmp/a"], [1])
    yield one("a set", {"type": "array", "items": whole_number, "uniqueItems": True}, [[], [1, 2]], [[1, 1]])


def _others() -> Iterator[Case]:
    text = {"type": "string"}
    yield one("zod uuid", text | {"format": "uuid", "pattern": ZOD_UUID}, [UUID], ["x", UUID[:-1]])
    yield one(
        "zod email", text | {"format": "email", "pattern": ZOD_EMAIL}, ["a.b@c.de"], ["a..b@c.de", ".a@c.de", "a@c"]
    )
    yield one("zod date", text | {"format": "date", "pattern": ZOD_DATE}, ["2024-02-29"], ["2023-02-29"])
    yield one("zod int", {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [0, 2**53 - 1], [2**53])
    yield one("zod nullable", {"type": ["string", "null"], "maxLength": 3}, ["abc", None], ["abcd", 1])
    yield one(
        "zod intersection",
        {
            "allOf": [
                {"type": "object", "properties": {"a": text}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ]
        },
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": 1}, {"a": 1, "b": 1}],
    )
    yield whole(
        "an extended definition",
        {
            "$defs": {"Base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
            "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"name": text}, "required": ["name"]}],
        },
        [{"id": 1, "name": "a"}],
        [{"id": 1}, {"name": "a"}, {"id": "1", "name": "a"}],
    )
    yield whole(
        "one of two properties",
        model({"a": text, "b": text}, "a") | {"required": [], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}],
        [{}, {"a": 1}],
    )
    yield one(
        "a reference with keywords", {"$ref": "#/$defs/S", "maxLength": 2, "$defs": {"S": text}}, ["ab"], ["abc", 1]
    )
    yield whole(
        "a strict tool",
        model(
            {
                "city": text | {"description": "d"},
                "unit": {"type": ["string", "null"], "enum": ["c", "f", None]},
                "days": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/D"}, {"type": "null"}]}},
            },
            **CLOSED,
        )
        | {"$defs": {"D": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], **CLOSED}}},
        [{"city": "Oslo", "unit": None, "days": [{"n": 1}, None]}],
        [{"city": "Oslo", "unit": "k", "days": []}, {"city": "Oslo"}],
    )


CASES: tuple[Case, ...] = (*_pydantic(), *_others())
# What the default backend refuses, and at which keywords.
REFUSED: dict[str, tuple[str, ...]] = {
    "int of a step": ("#/properties/x/multipleOf",),
    "a price": ("#/properties/x/multipleOf",),
    "HttpUrl": ("#/properties/x/format",),
    "dict of keys with a pattern": ("#/properties/x/patternProperties",),
    "dict of literal keys": ("#/properties/x/propertyNames",),
    "a set": ("#/properties/x/uniqueItems",),
    "zod intersection": ("#/properties/x/allOf",),
    "an extended definition": ("#/allOf",),
    "one of two properties": ("#/type", "#/properties"),
    "a reference with keywords": ("#/properties/x/maxLength",),
}
