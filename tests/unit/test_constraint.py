"""Constraints as text: measured before anything is read, laid out without being read, checked where they compile."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from phloem.compile_worker import compile_with
from phloem.constraint import Constraint, constraint_of, exact, within
from phloem.errors import RequestError
from phloem.params import SamplingParams
from phloem.testing.toy_grammar import ToyGrammar


def of(**given: Any) -> Constraint:
    made = constraint_of(SamplingParams(**given), "compact")
    assert made is not None
    return made


@pytest.mark.parametrize(
    "value",
    [
        {"b": 1, "a": [1.5, None, True, "\u00e9\n\u007f\U0001f600"]},
        True,
        {"x": 10**40, "y": -0.0},
        {"enum": []},
    ],
)
def test_a_value_and_its_text_are_one_constraint(value: Any) -> None:
    made = of(json_schema=value)
    assert made.value == json.dumps(value, ensure_ascii=False)
    for text in (json.dumps(value, ensure_ascii=False, indent=3), json.dumps(value, ensure_ascii=False)):
        assert of(json_schema=text) == made
    sent = within(SamplingParams(json_schema=value), 1000)
    assert constraint_of(sent, "compact") == made
    assert exact(of(json_schema=json.dumps(value))) == made == exact(made)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1e999}', "Out of range float"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": NaN}', "Out of range float"),
        ('{"a" 1}', "Expecting ':' delimiter: line 1 column 6"),
        ('{"a": "\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "not JSON"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused_before_a_backend_sees_it(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        compile_with({}, (), of(json_schema=text), 10)
    assert refusal.value.param == "json_schema"


def test_what_is_said_twice_counts_once_where_it_is_compiled() -> None:
    seen: list[str] = []

    class Kept(ToyGrammar):
        capabilities = frozenset({"json_schema"})

        def compile(self, constraint: Constraint) -> bytes:
            seen.append(constraint.value)
            raise RequestError("enough")

    backend = object.__new__(Kept)
    with pytest.raises(RequestError, match="enough"):
        compile_with({"toy": backend}, ("toy",), of(json_schema='{"a": 1, "a": 2}', strict=False), 10)
    assert seen == ['{"a": 2}']


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"regex": "\u00e4" * 501}, 1002),
        ({"ebnf": "a" * 1001}, 1001),
        ({"choices": ["a" * 1000]}, 1004),
        ({"json_schema": "a" * 5000}, 5000),
        ({"structural_tag": {"a": "b" * 1000}}, 1008),
    ],
)
def test_a_constraint_s_size_is_its_bytes(given: dict[str, Any], size: int) -> None:
    (name,) = given
    params = SamplingParams(**given)
    with pytest.raises(RequestError, match=f"^{name} of {size} bytes exceeds the limit of 1000"):
        within(params, 1000)
    assert within(params, size).constraints == [name]


def test_sizes_cost_nothing_beside_reading() -> None:
    """Ten megabytes took the loop's thread 0.4 s before they were refused."""
    schema = {"properties": {f"field_{i}": {"enum": ["a", "b", "c"], "type": "string"} for i in range(200_000)}}
    text = json.dumps(schema)
    begin = time.thread_time()
    json.loads(text)
    read = time.thread_time() - begin
    for value in (text, schema):
        params = SamplingParams(json_schema=value)
        begin = time.thread_time()
        with pytest.raises(RequestError, match="exceeds the limit"):
            within(params, 1 << 20)
        assert time.thread_time() - begin < read / 2
    begin = time.thread_time()
    constraint_of(SamplingParams(json_schema=text), "compact")
    assert time.thread_time() - begin < read / 2
