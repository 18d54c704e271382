"""The default configuration enforces the schemas that people send, or says at which keyword it cannot, and what can."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from everyday_schemas import CASES, PYDANTIC_DECIMAL, REFUSED, ZOD_DATE, ZOD_EMAIL
from grammar_corpus import Case, text_of
from grammar_rig import backend, takes

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.plugins.grammar._string_automaton import Product, product

pytest.importorskip("xgrammar")
XGRAMMAR = backend("xgrammar")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_enforced_or_refused(case: Case) -> None:
    check = jsonschema.Draft202012Validator(case.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert all(map(check.is_valid, case.valid))
    assert not any(map(check.is_valid, case.invalid))
    constraint = Constraint(kind="json_schema", value=json.dumps(case.schema))
    reported = [pointer for pointer, _ in XGRAMMAR.unenforced(constraint)]
    if case.name in REFUSED:
        assert tuple(reported) == REFUSED[case.name]
        return
    assert reported == []
    matcher = XGRAMMAR.matcher(constraint, XGRAMMAR.compile(constraint))
    assert [value for value in case.valid if not takes(matcher, text_of(value))] == []
    assert [value for value in case.invalid if takes(matcher, text_of(value))] == []


def holds(made: Product, text: str) -> bool:
    state: int | None = 0
    for char in map(ord, text):
        edges = made.edges[state] if state is not None else []
        state = next((to for ranges, to in edges if any(low <= char <= high for low, high in ranges)), None)
    return state is not None and made.final[state]


@pytest.mark.parametrize(
    ("patterns", "least", "most", "letters"),
    [
        (["^[a-z0-9]+(?:-[a-z0-9]+)*$"], 3, 8, "ab-9Z"),
        ([ZOD_EMAIL], 0, None, "ab.@-"),
        ([PYDANTIC_DECIMAL], 0, None, "0.1-+"),
        (["^id_"], 0, 6, "id_ab"),
        (["ab", "^a", "b$"], 2, 5, "abc"),
        ([ZOD_DATE], 0, None, "0123-"),
        (["(a|b)*c?$"], 2, 4, "abc"),
        ([r"^(?=.*\d)(?=.*[a-z])[a-z0-9]{3,}$"], 0, 6, "a1b-"),
    ],
)
def test_strings_satisfy_all_patterns_and_bounds(
    patterns: list[str], least: int, most: int | None, letters: str
) -> None:
    rng, made = random.Random(0), product(patterns, least, most)
    assert made is not None
    for _ in range(3000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(0, 11)))
        wanted = all(re.search(pattern, text) for pattern in patterns) and least <= len(text) <= (most or 99)
        assert holds(made, text) == wanted, text


def test_strings_that_cannot_be() -> None:
    assert product(["^a+$", "^b+$"], 0, None) is None
    assert product(["^a{2}$"], 3, 5) is None
    with pytest.raises(RequestError, match="more than 300 states"):
        product(["^(a|bc)*$"], 0, 5000)
