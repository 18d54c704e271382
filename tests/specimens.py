"""Constraints of every kind, each with a judge of its own that shares no code with any backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import lark
from schemas import schemas, validate

BACKENDS = ("xgrammar", "llguidance", "outlines")
# Whose dialect a kind is; the other kinds are for all.
_OWNERS = {"ebnf": ("xgrammar",), "lark": ("llguidance",)}


class Specimen(NamedTuple):
    """One constraint: `judge` raises for a whole text that is not in its language."""

    name: str
    kind: str  # the parameter of SamplingParams
    value: Any
    judge: Callable[[str], None]

    @property
    def backends(self) -> tuple[str, ...]:
        """Who has the kind at all."""
        return _OWNERS.get(self.kind, BACKENDS)


def specimens(schema_count: int, seed: int = 0) -> Iterator[Specimen]:
    """Schemas, and between them one of the other kinds after every third, as long as there are any."""
    others = (*map(_by_regex, _REGEXES), *(one for pair in map(_by_grammar, _GRAMMARS) for one in pair), *_OTHERS)
    rest = iter(others)
    for i, (name, schema) in enumerate(schemas(schema_count, seed)):
        yield Specimen(name, "json_schema", schema, _schema_judge(schema))
        yield from islice(rest, 1 if i % 3 == 2 else 0)
    yield from rest


def _schema_judge(schema: Any) -> Callable[[str], None]:
    def judge(text: str) -> None:
        validate(json.loads(text, parse_constant=_no_constant), schema)
        assert "\n" not in text, "compact whitespace"

    return judge


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def matches(pattern: str) -> Callable[[str], None]:
    """Judges by Python's `re.fullmatch`."""

    def judge(text: str) -> None:
        assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern!r}"

    return judge


def _by_regex(pattern: str) -> Specimen:
    return Specimen(f"regex {pattern}", "regex", pattern, matches(pattern))


_REGEXES = (
    r"[A-Z]{2,3}-\d{4}",
    r"(\+\d{1,3} )?\(?\d{3}\)? \d{3}-\d{4}",
    r"(yes|no|maybe)(, (and|but) (yes|no)){0,3}\.",
    r"(?i)select [a-z]{1,6} from [a-z]{1,6};",
    r"[^\W\d_]{1,6}( [^\W\d_]{1,6}){0,3}",
    r"(a|ab)(c|bcd)(d*|e){1,3}",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?",
    r"<b>[^<>]{0,10}</b>",
    r"(é|世界|🙂){1,4}",
    r"\[(\d{1,2}(, \d{1,2}){0,3})?\]",
    r"\S{1,5}\s\S{1,5}",
    r"",
)

# Pairs of one language: in xgrammar's dialect, and in Lark, by which lark's Earley parser judges the outputs of both.
_GRAMMARS = (
    (
        "sums",
        'root ::= term ([+*-] term)*\nterm ::= [0-9] [0-9]? | "(" root ")"',
        'start: term (OP term)*\nterm: N | "(" start ")"\nOP: /[+*-]/\nN: /[0-9][0-9]?/',
    ),
    (
        "queries",
        'root ::= "SELECT " cols " FROM " name (" WHERE " name "=" [0-9]{1,3})? ";"\n'
        'cols ::= "*" | name ("," name){0,2}\nname ::= [a-z]{1,4}',
        'start: "SELECT " cols " FROM " NAME (" WHERE " NAME "=" /[0-9]{1,3}/)? ";"\n'
        'cols: "*" | NAME ("," NAME)~0..2\nNAME: /[a-z]{1,4}/',
    ),
    (
        "nested lists",
        'root ::= "[" (item ("," item){0,2})? "]"\nitem ::= "x" | root',
        'start: "[" (item ("," item)~0..2)? "]"\nitem: "x" | start',
    ),
    (
        "equal numbers of two letters",
        'root ::= "a" root "b" | "ab"',
        'start: "a" start "b" | "ab"',
    ),
    (
        "left recursion of words",
        'root ::= root " and " word | word\nword ::= "é" | "世界" | "tree"',
        'start: start " and " word | word\nword: "é" | "世界" | "tree"',
    ),
    (
        "palindromes",
        'root ::= "0" root "0" | "1" root "1" | "."',
        'start: "0" start "0" | "1" start "1" | "."',
    ),
)


@cache
def _parser(grammar: str) -> lark.Lark:
    return lark.Lark(grammar, parser="earley", lexer="dynamic_complete")


def _by_grammar(pair: tuple[str, str, str]) -> tuple[Specimen, Specimen]:
    name, ebnf, source = pair

    def judge(text: str) -> None:
        _parser(source).parse(text)

    return Specimen(f"ebnf of {name}", "ebnf", ebnf, judge), Specimen(f"lark of {name}", "lark", source, judge)


_CHOICES = ["yes", "no", "yes, but later", 'a "quoted" one', "größer", "世界", "a|b", "(", "\\d"]
_CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"type": "array", "items": {"enum": [1, "é"]}, "maxItems": 3}},
    "end": "</call>",
}
_TAG = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]{1,5}: "}, _CALL]}}


def _one_of_them(text: str) -> None:
    assert text in _CHOICES, text


_OTHERS = (
    Specimen("choices", "choices", _CHOICES, _one_of_them),
    Specimen(
        "structural tag",
        "structural_tag",
        _TAG,
        matches(r'[a-z]{1,5}: <call>\[((1|"é")(, (1|"é")){0,2})?\]</call>'),
    ),
)
