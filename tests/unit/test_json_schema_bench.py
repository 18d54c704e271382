"""The conformance bench: each class of verdict, the forms in which instances are tried, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("outlines_core")

from bench.json_schema import Group, Verdict, groups, judge, load_backend, page, spellings
from phloem.constraint import Constraint, Unenforced

OUTLINES: Any = load_backend("outlines")


def group(schema: Any, *tests: tuple[Any, bool]) -> Group:
    return Group("draft7", "file", "name", schema, tests)


class Silent:
    """Compiles what outlines compiles, and reports nothing."""

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(OUTLINES, name)


def test_every_class_of_verdict() -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert judge(OUTLINES, group({"type": "integer"}, (1, True), ("a", False))) == Verdict("enforced")
    assert judge(OUTLINES, group(unique, ([1, 1], False))) == Verdict(
        "refused", ("#/uniqueItems: outlines ignores uniqueItems",)
    )
    assert judge(OUTLINES, group({"type": "array", "items": {"$ref": "#"}})).kind == "refused"
    assert judge(OUTLINES, group(True, ([[[1]]], True), (1, True))) == Verdict("unreachable", ("[[[1]]]",))
    silent: Any = Silent()
    assert judge(silent, group(unique, ([1, 2], True), ([1, 1], False))) == Verdict("wrong", ("[1, 1]",))


def test_instances_are_tried_in_every_form_of_a_backend() -> None:
    assert spellings({"b": 1.0, "a": "é"}, ["a", "b"]) >= {
        '{"a": "é", "b": 1}'.encode(),
        '{"b":1,"a":"é"}'.encode(),
        b'{"b": 1.0, "a": "\\u00e9"}',
    }
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    assert judge(OUTLINES, group(numbers, ({"b": 1.0, "a": 2}, True))).kind == "enforced"


def test_the_suite_is_read_and_the_page_counts_schemas(tmp_path: Path) -> None:
    for name, where in (("type", "draft7"), ("date", "draft7/optional/format"), ("format", "draft7")):
        tests = {"description": name, "schema": {"type": "null"}, "tests": [{"data": None, "valid": True}]}
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        (tmp_path / where / f"{name}.json").write_text(json.dumps([tests, tests]))
    found = list(groups(tmp_path))
    assert {(one.file, one.schema["$schema"]) for one in found} == {
        ("type", "http://json-schema.org/draft-07/schema#"),
        ("format: date", "http://json-schema.org/draft-07/schema#"),
    }
    verdicts = [Verdict("enforced"), Verdict("wrong", ("[1, 1]",)), Verdict("refused"), Verdict("unreachable")]
    text = page({"mine": list(zip(found, verdicts, strict=True))})
    assert "| type | 1 / 0 / 0 / 1 |" in text
    assert "| **all** | 1 / 1 / 1 / 1 |" in text
    assert "- mine: draft7, type, type: `[1, 1]`" in text
    assert "None." in page({"mine": [(found[0], Verdict("enforced"))]})
