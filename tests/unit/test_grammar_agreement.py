"""The masks of all backends agree, on every transition of a constraint's automaton over a small vocabulary.

The automaton is that of outlines, the one backend that has all states ahead. Each transition is taken at every depth
at which it can be, up to `DEPTH` tokens, and the masks of all backends in the state behind it are compared: a count
that only another backend keeps shows at some depth. Every known `Difference` is data, with its reason, which the
documentation repeats; one that no longer occurs is an error too.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")

from grammar_rig import END, allowed, backend

from phloem.constraint import Constraint
from phloem.interfaces import Matcher

NAMES = ("xgrammar", "llguidance", "outlines")
WORDS = (
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "abc",
    "0",
    "1",
    "2",
    "10",
    "12",
    "-",
    ".",
    "+",
    "e",
    "n",
    "u",
    "\\",
    '"',
    '"a',
    '{"',
)
MARKS = ("{", "}", "[", "]", ":", ",", " ", ", ", '":', '": ', "true", "null", "\n", "é")
# Among them parts of characters: of é, and of 世.
PIECES = (*(word.encode() for word in (*WORDS, *MARKS)), b"\xc3", b"\xa9", b"\xe4\xb8", b"\x96")
SIZE = len(PIECES) + 1
DEPTH = 9
BACKENDS = {name: backend(name, PIECES) for name in NAMES}
NESTED = (b"[", b"{", b'{"')


class Difference(NamedTuple):
    """Tokens that one backend alone allows, or alone forbids, somewhere in a constraint."""

    backend: str
    alone: str  # "allows" or "forbids"
    tokens: tuple[bytes, ...]  # b"" is the end
    why: str


NEGATIVE_ZERO = Difference("llguidance", "allows", (b"0",), "`-0` is an integer")
ESCAPED = Difference("llguidance", "forbids", (b"u",), "a character is never written as `\\uXXXX`")
NO_ESCAPES = Difference(
    "xgrammar", "forbids", (b"\\",), "no escapes in strings with lengths, nor in counted parts of a pattern"
)
SHALLOW = Difference("outlines", "forbids", NESTED, "two levels within a value of which the schema says nothing")
OPEN = Difference("llguidance", "allows", (b",", b", "), "objects are open where `additionalProperties` is absent")
ZEROS = Difference("llguidance", "forbids", (b"",), "no trailing zeros behind an exclusive bound")
DIGITS = Difference("llguidance", "allows", (b"0", b"1", b"2", b"10", b"12"), "exponents of any length")
ENDS = Difference(
    "xgrammar", "forbids", (b"0", b"1", b"2", b"10", b"12"), "long exponents where the schema says nothing, too"
)
ASCII = Difference("xgrammar", "forbids", ("é".encode(), b"\xc3", b"\xe4\xb8"), "`\\w` has ASCII letters only")
BROKEN = Difference("xgrammar", "allows", (*PIECES, b""), "free text of structural tags may have broken characters")


class Case(NamedTuple):
    """A constraint, and how the backends differ."""

    kind: str
    value: Any
    differences: tuple[Difference, ...] = ()


def _regexes() -> Iterator[Case]:
    alike = ("a|ab", "(ab|c)*", "a*b?c{2,3}", "[abc]{0,4}", "[^a]b", "é+", ".", "[^é]", "世?a", "(a|b)*abb", r"\d+")
    for pattern in (*alike, "a+?b", "(?i)AB", "1(0|2)*", "", "a?", "[a-c]*1", r"\S", "(a(bc+)?|b)*c", r"\{\"a\": 1\}"):
        yield Case("regex", pattern)
    yield Case("regex", r"\w\s", (ASCII,))
    for choices in (["abc", "ab", "b"], ["a", "1", "10", "a."], ["é", "世"], ['"a"'], ["a\n", "a b"]):
        yield Case("choices", choices)


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _schemas() -> Iterator[Case]:
    one, two = {"const": 1}, {"const": 2}
    alike: list[Any] = [
        {"type": "null"},
        {"type": "boolean"},
        {"enum": ["a", 1, None, "é"]},
        {"const": "a\nb"},
        {"anyOf": [{"type": "null"}, one]},
        {"type": "integer", "minimum": 0, "maximum": 12},
        {"type": "integer", "minimum": -12},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 120},
        _object({}),
        _object({"a": {"type": "boolean"}}, "a"),
        _object({"é": {"type": "null"}}, "é"),
        _object({"a": one, "b": two}),
        _object({"a": one, "b": two, "c": {"const": 0}}, "b"),
        _object({"a": _object({"b": one}, "b")}, "a"),
        {"type": "array", "items": {"type": "null"}},
        {"type": "array", "items": one, "minItems": 1, "maxItems": 2},
        {"type": "array", "prefixItems": [one, two], "items": False},
        {"type": "array", "prefixItems": [one, two], "items": False, "minItems": 2},
        {"type": "array", "maxItems": 0},
        {"type": "string", "format": "ipv4"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["ab", "abc"]}}},
    ]
    yield from (Case("json_schema", schema) for schema in alike)
    yield Case("json_schema", {"type": "number"}, (DIGITS,))
    yield Case("json_schema", {"type": "integer"}, (NEGATIVE_ZERO,))
    yield Case("json_schema", {"type": ["null", "integer"]}, (NEGATIVE_ZERO,))
    yield Case("json_schema", {"type": "string"}, (ESCAPED,))
    yield Case("json_schema", {"type": "string", "minLength": 1, "maxLength": 2}, (NO_ESCAPES,))
    yield Case("json_schema", {"type": "string", "pattern": "ab"}, (ESCAPED,))
    yield Case("json_schema", {"type": "string", "pattern": "^[ab]{1,2}$"})
    yield Case("json_schema", {"type": "number", "minimum": 0, "maximum": 1})
    yield Case("json_schema", {"type": "number", "exclusiveMinimum": 0}, (ZEROS,))
    yield Case("json_schema", {"type": "object", "properties": {"a": one}, "required": ["a"]}, (OPEN,))
    yield Case("json_schema", _object({"a": one}) | {"additionalProperties": two}, (ESCAPED,))
    yield Case("json_schema", {"type": "object", "additionalProperties": one}, (ESCAPED,))
    yield Case("json_object", None, (ESCAPED, SHALLOW, ENDS))


def _tags() -> Iterator[Case]:
    text, schema = {"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": {"type": "null"}}
    tag = {"type": "tag", "begin": "a", "content": schema, "end": "bc"}
    alike: list[Any] = [
        {"type": "sequence", "elements": [text, {"type": "regex", "pattern": "b|bc"}, schema]},
        {"type": "or", "elements": [text, schema]},
        {"type": "repeat", "min": 1, "max": 2, "content": text},
        {"type": "tags_with_separator", "separator": ", ", "tags": [tag]},
        tag,
    ]
    yield from (Case("structural_tag", {"format": node}) for node in alike)
    yield Case("structural_tag", {"format": tag | {"content": {"type": "any_text"}}}, (BROKEN,))


CASES = (*_regexes(), *_schemas(), *_tags())


def matcher_of(name: str, case: Case) -> Matcher:
    value = "" if case.value is None else case.value if case.kind == "regex" else json.dumps(case.value)
    constraint = Constraint(kind=case.kind, value=value)
    assert BACKENDS[name].unenforced(constraint) == []
    return BACKENDS[name].matcher(constraint, BACKENDS[name].compile(constraint))


def walk(case: Case) -> dict[tuple[str, str, int], bytes]:
    """Masks in which a backend differs from the others: (backend, allows or forbids, token), and after which text.

    Breadth first; goes on by tokens that all backends allow.
    """
    todo = deque([((), {name: matcher_of(name, case) for name in NAMES})])
    found: dict[tuple[str, str, int], bytes] = {}
    seen: set[tuple[int, int, int]] = set()
    while todo:
        path, matchers = todo.popleft()
        masks = {name: allowed(matcher, SIZE) for name, matcher in matchers.items()}
        votes = Counter(token for mask in masks.values() for token in mask)
        for token, count in votes.items():
            for name, mask in masks.items():
                if count < len(NAMES) and (token in mask) == (count == 1):
                    how = "allows" if count == 1 else "forbids"
                    found.setdefault((name, how, token), b"".join(map(piece, path)))
        state: int = matchers["outlines"]._states[-1]  # type: ignore[attr-defined]
        for token in sorted(frozenset.intersection(*masks.values()) - {END}):
            if len(path) < DEPTH and (state, token, len(path)) not in seen:
                seen.add((state, token, len(path)))
                forks = {name: matcher.fork() for name, matcher in matchers.items()}
                assert all(matcher.accept(token) for matcher in forks.values())
                todo.append(((*path, token), forks))
    return found


def piece(token: int) -> bytes:
    return PIECES[token - 1] if token else b""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{json.dumps(case.value)}")
def test_masks_agree(case: Case) -> None:
    found = walk(case)
    known = {(one.backend, one.alone, token): one for one in case.differences for token in one.tokens}
    met = set()
    for (name, how, token), text in found.items():
        one = known.get((name, how, piece(token)))
        assert one is not None, f"after {text!r} only {name} {how} {piece(token)!r}"
        met.add(one)
    assert met == set(case.differences), "a difference has gone: take it out of the list"


def test_differences_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/structured-outlines.md").read_text()
    for one in {one for case in CASES for one in case.differences}:
        assert f"| {one.backend} | {one.why} |" in page
