"""Constraints that are sent to hurt: each is refused, or costs a bounded amount, over every backend."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_TEXT = {"type": "string"}
_HEAVY = frozenset(
    {"counts of counts", "counts three deep", "counts of anything", "exponential automaton", "many options"}
    | {"many alternatives", "large classes", "items of items", "range beyond 64 bits", "many properties"}
    | {"some properties", "large enum", "long constant", "nested oneOf", "nested anyOf", "many choices", "multipleOf"}
    | {"EBNF, counts of counts", "doubling allOf", "doubling properties"}
)


class Attack(NamedTuple):
    """`value` as SamplingParams takes it. A `refused` one is an error everywhere, else either is right."""

    name: str
    kind: str
    value: Any
    refused: bool = False

    @property
    def heavy(self) -> bool:
        """Costs some backend tenths of a second of CPU, or seconds."""
        return self.name in _HEAVY

    @property
    def backends(self) -> tuple[str, ...]:
        """Who has the kind at all."""
        return {"ebnf": ("xgrammar",), "lark": ("llguidance",)}.get(self.kind, ("xgrammar", "llguidance", "outlines"))


def _nested(depth: int, key: str, inner: str = "true") -> str:
    """Schemas within each other, as text: building them as objects would already recurse."""
    opened = {"items": '{"items":', "anyOf": '{"anyOf":[', "properties": '{"properties":{"a":', "allOf": '{"allOf":['}
    closed = {"items": "}", "anyOf": "]}", "properties": "}}", "allOf": "]}"}
    return opened[key] * depth + inner + closed[key] * depth


def _branching(depth: int, key: str) -> Any:
    schema: Any = _TEXT
    for _ in range(depth):
        schema = {key: [schema, {"type": "array", "items": schema}]}
    return schema


def _doubling(depth: int, key: str) -> Any:
    """References that double at each step: a line of text, 2 ** depth schemas."""
    last = {f"d{depth}": _TEXT}
    if key == "allOf":
        defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    else:
        parts = [{name: {"$ref": f"#/$defs/d{i + 1}"} for name in "xy"} for i in range(depth)]
        defs = {f"d{i}": {"type": "object", "properties": part, "required": ["x", "y"]} for i, part in enumerate(parts)}
    return {"$ref": "#/$defs/d0", "$defs": defs | last}


def _doubling_rules(depth: int) -> str:
    return "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(depth)) + f'a{depth} ::= "x"'


def _circle(*names: str) -> Any:
    defs = {name: {"$ref": f"#/$defs/{after}"} for name, after in zip(names, (*names[1:], names[0]), strict=True)}
    return {"$ref": f"#/$defs/{names[0]}", "$defs": defs}


REGEXES = (
    Attack("nested plus", "regex", "(a+)+$"),
    Attack("nested plus and more", "regex", "(a+)+b"),
    Attack("ambiguous stars", "regex", "((a|aa)*)*b"),
    Attack("stars of nothing", "regex", "(()*)*(a?)*"),
    Attack("counts of counts", "regex", "(a{1000}){1000}"),
    Attack("counts beside counts", "regex", "a{1000}{1000}"),
    Attack("counts three deep", "regex", "((a{1,100}){1,100}){1,100}"),
    Attack("counts of anything", "regex", r"(.{0,1000}x){0,1000}[\s\S]{1000000}"),
    Attack("exponential automaton", "regex", "(.|\n)*1.{200}x"),
    Attack("many options", "regex", "(?i)" + "(a)?(b)?(c)?(d)?" * 100),
    Attack("deep groups", "regex", "(" * 5000 + ")" * 5000),
    Attack("unclosed groups", "regex", "(" * 20_000, refused=True),
    Attack("many alternatives", "regex", "|".join(f"w{i}x" for i in range(5000))),
    Attack("large classes", "regex", r"[^\W\d_]{1,1000}" * 5),
    Attack("nothing", "regex", ""),
    Attack("never", "regex", r"a[^\s\S]", refused=True),
    Attack("half a pair", "regex", "a\ud800", refused=True),
    Attack("a NUL", "regex", "a\0b"),
)
BOUNDS = (
    Attack("maxItems", "json_schema", {"type": "array", "items": {"type": "array", "maxItems": 10**9}}),
    Attack("minItems", "json_schema", {"type": "array", "minItems": 10**9}),
    Attack("items of items", "json_schema", {"items": {"items": {"minItems": 9999}, "minItems": 9999}}),
    Attack("maxLength", "json_schema", {"type": "string", "maxLength": 10**9}),
    Attack("bound beyond 64 bits", "json_schema", {"type": "string", "maxLength": 10**30}),
    Attack("range beyond 64 bits", "json_schema", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    Attack("digits", "json_schema", '{"type": "integer", "maximum": 1' + "0" * 5000 + "}"),
    Attack("multipleOf", "json_schema", {"type": "integer", "multipleOf": 10**9 + 7}),
    Attack("tiny multipleOf", "json_schema", {"type": "number", "multipleOf": 1e-300}),
    Attack("many properties", "json_schema", {"type": "object", "properties": {f"p{i}": _TEXT for i in range(5000)}}),
    Attack("some properties", "json_schema", {"type": "object", "properties": {f"p{i}": _TEXT for i in range(300)}}),
    Attack("large enum", "json_schema", {"enum": [f"v{i}" for i in range(20_000)]}),
    Attack("long constant", "json_schema", {"const": "x" * 200_000}),
)
REFERENCES = (
    Attack("$ref to itself", "json_schema", {"$ref": "#"}),
    Attack("$ref in a circle", "json_schema", _circle("a", "b", "c")),
    Attack("$ref through allOf", "json_schema", {"allOf": [{"$ref": "#"}]}),
    Attack("$ref through anyOf", "json_schema", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    Attack("$ref through not", "json_schema", {"not": {"$ref": "#"}}, refused=True),
    Attack("endless object", "json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    Attack("endless list", "json_schema", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    Attack("doubling allOf", "json_schema", _doubling(60, "allOf")),
    Attack("doubling properties", "json_schema", _doubling(40, "properties")),
    Attack("$ref to nowhere", "json_schema", {"$ref": "#/$defs/none"}, refused=True),
    Attack("$ref to a file", "json_schema", {"$ref": "file:///etc/passwd"}, refused=True),
    Attack("$ref to a server", "json_schema", {"$ref": "http://127.0.0.1:1/schema"}, refused=True),
)
IMPOSSIBLE = (
    Attack("empty enum", "json_schema", {"enum": []}, refused=True),
    Attack("minimum over maximum", "json_schema", {"type": "integer", "minimum": 5, "maximum": 2}, refused=True),
    Attack("no number between", "json_schema", {"type": "number", "exclusiveMinimum": 1, "maximum": 1}, refused=True),
    Attack("minLength over maxLength", "json_schema", _TEXT | {"minLength": 3, "maxLength": 2}, refused=True),
    Attack("minItems over maxItems", "json_schema", {"type": "array", "minItems": 3, "maxItems": 2}, refused=True),
    Attack("types at odds", "json_schema", {"allOf": [_TEXT, {"type": "integer"}]}, refused=True),
    Attack(
        "required but false",
        "json_schema",
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        refused=True,
    ),
    Attack("false", "json_schema", False, refused=True),
    Attack("negative bound", "json_schema", {"type": "string", "maxLength": -1}, refused=True),
    Attack("fractional bound", "json_schema", {"type": "string", "maxLength": 1.5}, refused=True),
    Attack("words for bounds", "json_schema", {"type": "array", "maxItems": "9"}, refused=True),
    Attack("no schema", "json_schema", "[1]", refused=True),
    Attack("no JSON", "json_schema", '{"a": ', refused=True),
    Attack("NaN", "json_schema", '{"maximum": NaN}', refused=True),
)
DEPTHS = (
    *(Attack(f"10,000 levels of {key}", "json_schema", _nested(10_000, key), refused=True)
      for key in ("items", "anyOf", "properties", "allOf")),
    Attack("100,000 brackets", "json_schema", "[" * 100_000, refused=True),
    Attack("500 levels", "json_schema", _nested(500, "items")),
    Attack("nested oneOf", "json_schema", _branching(12, "oneOf")),
    Attack("nested anyOf", "json_schema", _branching(12, "anyOf")),
)  # fmt: skip
TEXTS = (
    Attack("half a pair in a key", "json_schema", {"type": "object", "properties": {"\ud800": _TEXT}}, refused=True),
    Attack("half a pair in a value", "json_schema", {"const": "\udfff"}, refused=True),
    Attack("a NUL in a key", "json_schema", {"type": "object", "properties": {"a\0b": _TEXT}, "required": ["a\0b"]}),
    Attack("a NUL in a pattern", "json_schema", {"type": "string", "pattern": "^a\0b$"}),
    Attack("a key twice", "json_schema", '{"type": "string", "type": "integer", "maximum": 9, "minimum": 0}'),
    Attack("half a pair among choices", "choices", ["\ud800"], refused=True),
    Attack("a NUL among choices", "choices", ["a\0b", "\0"]),
    Attack("many choices", "choices", [f"w{i}x" for i in range(5000)]),
)
GRAMMARS = (
    Attack("EBNF, left recursion", "ebnf", 'root ::= root "a" | "b"'),
    Attack("EBNF, no end after a while", "ebnf", 'root ::= "a" | "b" x\nx ::= "x" x', refused=True),
    Attack("EBNF, nothing but itself", "ebnf", "root ::= root", refused=True),
    Attack("EBNF, a circle", "ebnf", "root ::= a\na ::= b\nb ::= a", refused=True),
    Attack("EBNF, loops of nothing", "ebnf", 'root ::= (""* "")* ("a"*)*'),
    Attack("EBNF, no end", "ebnf", 'root ::= "x" root', refused=True),
    Attack("EBNF, counts of counts", "ebnf", 'root ::= a{1000}\na ::= b{1000}\nb ::= "x"{1000}'),
    Attack("EBNF, deep", "ebnf", "root ::= " + "(" * 5000 + '"x"' + ")" * 5000),
    Attack("EBNF, doubling", "ebnf", _doubling_rules(40), refused=True),
    Attack("EBNF, half a pair", "ebnf", 'root ::= "\ud800"', refused=True),
    Attack("EBNF, empty", "ebnf", "", refused=True),
    Attack("Lark, ambiguous", "lark", 'start: a\na: a a | "x" | ""'),
    Attack("Lark, nothing but itself", "lark", "start: a\na: a"),
    Attack("Lark, no end", "lark", 'start: a\na: "x" a'),
    Attack("Lark, deep", "lark", "start: " + "(" * 3000 + '"x"' + ")" * 3000),
    Attack("Lark, counts of counts", "lark", 'start: a{1,100000}\na: b{1,100000}\nb: "x"{1,100000} "y"'),
    Attack("Lark, half a pair", "lark", 'start: "\ud800"', refused=True),
    Attack("Lark, empty", "lark", "", refused=True),
)  # fmt: skip
ATTACKS = (*REGEXES, *BOUNDS, *REFERENCES, *IMPOSSIBLE, *DEPTHS, *TEXTS, *GRAMMARS)
# Longer than `grammar.max_source` allows by default.
LARGE = Attack("10 MB", "json_schema", json.dumps({"enum": ["x" * 100] * 100_000}), refused=True)
