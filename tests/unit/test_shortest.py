"""The shortest text of a grammar's rules: what bounds the text that a grammar may force."""

from __future__ import annotations

import json
import math
import re
import time

import pytest

pytest.importorskip("xgrammar")

from grammar_rig import backend

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.plugins.grammar._shortest import shortest
from phloem.plugins.grammar.xgrammar import XGrammar

LOOP = 'root ::= "a" | "b" x\nx ::= "x" x'
LENGTHS = [
    ('root ::= (("a") | ("b" x))\nx ::= (("x" x))\n', {"root": 1, "x": math.inf}),
    ('root ::= ((a{2, 9} b))\na ::= ((b{3, 3}) | (root))\nb ::= (("é\\n"))', {"root": 14, "a": 6, "b": 2}),
    ('root ::= ((["\\]a-z] [^(]* "(|)\\"" a)) (=("x" "yyy"))\na ::= ("" | (a))', {"root": 5, "a": 0}),
    (
        'root ::= ((t "<"))\nt ::= TagDispatch(\n  ("<f", g),\n  excludes=("x")\n) (=(g))\ng ::= (g)',
        {"root": 1, "t": 0},
    ),
    ("root ::= ((root) | (root root))", {"root": math.inf}),
    ('a-1.b ::= (("x" (("yy") | ("zzz" "")) "w"))', {"a-1.b": 4}),
]


@pytest.mark.parametrize(("source", "lengths"), LENGTHS)
def test_lengths(source: str, lengths: dict[str, float]) -> None:
    found = shortest(source)
    assert {name: found[name] for name in lengths} == lengths


def test_the_order_of_rules_costs_little() -> None:
    rules = [f'a{i} ::= ((a{i + 1} a{i + 1}) | ("x" a{i + 1}))' for i in range(2000)]
    for order in (rules, rules[::-1]):
        began = time.thread_time()
        assert shortest("\n".join([*order, 'a2000 ::= (("x"))']))["a0"] == 2001
        assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("ebnf", LOOP, "no text ever ends under one of its rules"),
        ("ebnf", 'root ::= "a" | a{1000}\na ::= b{1000}\nb ::= "x"', "the shortest text has 1000000 characters"),
        ("regex", "a|b(c{1000}){1000}", "the shortest text of a part of it has 1000001 characters"),
    ],
)
def test_text_forced_without_end_is_refused(kind: str, value: str, words: str) -> None:
    """Also where it is met in the middle only: there the library would fill the engine's own memory."""
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        backend("xgrammar").compile(Constraint(kind=kind, value=value))
    assert error.value.param == kind


def test_ordinary_grammars_are_short() -> None:
    grammar = backend("xgrammar")
    assert isinstance(grammar, XGrammar)
    tag = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}
    for kind, value, least in (
        ("json_schema", '{"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}', 9),
        ("structural_tag", json.dumps({"format": tag}), 2),
        ("regex", "a{3,}b?|c{9}", 3),
        ("choices", '["yes", "no"]', 2),
    ):
        compiled = grammar._compiled(Constraint(kind=kind, value=value))
        assert shortest(str(compiled.grammar))["root"] == least
