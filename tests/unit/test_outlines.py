"""The backend outlines: its languages against Python's `re` and `json`, its report, its refusals, its matcher."""

from __future__ import annotations

import itertools
import json
import random
import re
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

pytest.importorskip("outlines_core")

from grammar_corpus import CASES, Case, text_of
from grammar_rig import BYTES, END, allowed, backend, takes, tokenizer_of

from phloem.constraint import Constraint
from phloem.errors import PluginError, RequestError
from phloem.interfaces import Matcher, PluginContext
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.grammar import _json_regex as rx
from phloem.plugins.grammar._automaton import Automaton
from phloem.plugins.grammar._index import expanded_size
from phloem.plugins.grammar._json_number import number
from phloem.plugins.grammar._text_regex import TooLongError, text_until, text_without
from phloem.plugins.grammar.outlines import Outlines

BACKEND = backend("outlines")
STEPS = [Decimal(step) for step in ("0.1", "-0.1", "0.001", "-0.001", "1", "-1", "0.00001", "-0.00001")]


@cache
def compiled(kind: str, value: str, whitespace: str = "compact", strict: bool = True) -> Matcher:
    constraint = Constraint(kind=kind, value=value, whitespace=whitespace, strict=strict)
    return BACKEND.matcher(constraint, BACKEND.compile(constraint))


def schema(value: Any, **more: Any) -> Matcher:
    return compiled("json_schema", json.dumps(value), **more)


def reported(value: Any) -> list[tuple[str, str]]:
    return [tuple(one) for one in BACKEND.unenforced(Constraint(kind="json_schema", value=json.dumps(value)))]


def refusal(kind: str, value: str) -> str:
    with pytest.raises(RequestError) as refused:
        compiled(kind, value)
    assert refused.value.param == kind
    return refused.value.message


def python(rust: str) -> re.Pattern[str]:
    """For patterns without Rust's own classes."""
    return re.compile(re.sub(r"\\u\{(\w+)\}", lambda match: re.escape(chr(int(match[1], 16))), rust))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_schemas_of_the_corpus_are_exact_or_reported_or_refused(case: Case) -> None:
    if reported(case.schema):
        schema(case.schema, strict=False)
        return
    if case.name.startswith("recursion"):
        assert "refers to what it is a part of" in refusal("json_schema", json.dumps(case.schema))
        return
    matcher = schema(case.schema)
    for value in case.valid:
        assert takes(matcher, text_of(value)), value
    for value in case.invalid:
        assert not takes(matcher, text_of(value)), value


PATTERNS = ["a|ab", "(a|ab)(c|bcd)?", "a*?b??", "", "a?", "(a|b)*abb", "[^a]", "(?i:A)b", "a{2,3}?", r"\w+", "(|a)b|c"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regexes_mean_what_they_mean_in_python(pattern: str) -> None:
    """The library itself drops alternatives after one that matches."""
    matcher = compiled("regex", pattern)
    for length in range(5):
        for letters in itertools.product("abcA", repeat=length):
            text = "".join(letters)
            assert takes(matcher, text.encode()) == bool(re.fullmatch(pattern, text)), text


def test_choices_are_texts_not_patterns() -> None:
    matcher = compiled("choices", json.dumps(["a.c", "a", "ab", "é|", "世"]))
    assert all(takes(matcher, text.encode()) for text in ["a.c", "a", "ab", "é|", "世"])
    assert not any(takes(matcher, text.encode()) for text in ["abc", "", "é", "a.", "世世"])


ATOMS = ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\S", '"', r"\\", r"\n", "é", "/", '[^"]', r"\D"]
TEXTS = [
    "a",
    "b",
    "ab",
    "aa",
    "",
    '"',
    "\\",
    "\n",
    "é",
    "1",
    "a1",
    "a b",
    'ab"',
    "/",
    "a.b",
    "世",
    "_",
    "\x01",
    "ba",
    "a\n",
]


def test_patterns_of_strings_are_searched_in_their_values() -> None:
    """On random patterns; where Python and ECMAScript differ only what both allow is."""
    rng = random.Random(0)
    judged = 0
    for _ in range(60):
        parts = [rng.choice(ATOMS) + rng.choice(["", "", "*", "+", "?", "{2}"]) for _ in range(rng.randint(1, 3))]
        body = "".join(parts) if rng.random() < 0.6 else f"({parts[0]}|{parts[-1]}){parts[0]}"
        pattern = rng.choice(["", "^"]) + body + rng.choice(["", "$"])
        assert reported({"pattern": pattern}) == []
        matcher = schema({"type": "string", "pattern": pattern})
        for text in TEXTS:
            got, expected = takes(matcher, text_of(text)), bool(re.search(pattern, text))
            assert got == expected or (not got and text in ("é", "世", "\n", "a\n")), (pattern, text)
            judged += got
    assert judged > 200


def test_anchors_in_some_alternatives_of_a_group_are_reported() -> None:
    assert reported({"type": "string", "pattern": "(^a|b)c"}) == [
        ("#/pattern", "outlines: an anchor in some alternatives of a group cannot be enforced (character 5)")
    ]
    assert reported({"type": "string", "pattern": "^a|b$"}) == []
    assert "a flag cannot be enforced" in reported({"type": "string", "pattern": "(?i)a"})[0][1]
    assert "not a regular expression" in reported({"type": "string", "pattern": "("})[0][1]


def test_integers_between_bounds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        low, high = (rng.choice([None, rng.randint(-130, 130)]) for _ in range(2))
        whole = rx.integer(low, high)
        ends = [end for end in (low, high) if end is not None]
        for value in [*(rng.randint(-1500, 1500) for _ in range(20)), *ends, 0, 1, -1]:
            fits = (low is None or value >= low) and (high is None or value <= high)
            assert (whole is not None and re.fullmatch(whole, str(value)) is not None) == fits


@pytest.mark.parametrize("decimals", [0, 1, 3])
def test_numbers_between_bounds(decimals: int) -> None:
    rng = random.Random(1)
    for _ in range(300):
        low, high = (
            rng.choice([None, Decimal(str(round(rng.choice([2, 130]) * rng.uniform(-1, 1), decimals)))])
            for _ in range(2)
        )
        above, below = low is not None and rng.random() < 0.5, high is not None and rng.random() < 0.5
        real = number(low, high, above=above, below=below)
        ends = [end for end in (low, high) if end is not None]
        texts = [f"{rng.uniform(-150, 150):.{rng.randrange(1, 4)}f}" for _ in range(20)]
        texts += [f"{end}{more}" for end in ends for more in ("0", "5", "000") if "." in str(end)]
        texts += [str(end) for end in ends] + [format(end + step, "f") for end in ends for step in STEPS]
        for text in {text for text in texts if not text.startswith("-0") or Decimal(text)}:
            value = Decimal(text)
            fits = (low is None or value > low or (value == low and not above)) and (
                high is None or value < high or (value == high and not below)
            )
            assert (real is not None and re.fullmatch(real, text) is not None) == fits, (low, high, text, real)


def test_other_keys_are_all_but_the_named_ones() -> None:
    for names in (["a", "ab", "abc", ""], ["ab"], ["a", "b"], [], ["abc", "abd", "b"], ['a"']):
        pattern = python(rx.other_key(names))
        for length in range(5):
            for letters in itertools.product("abcd", repeat=length):
                text = "".join(letters)
                assert bool(pattern.fullmatch(f'"{text}"')) == (text not in names)


def test_free_text_lacks_what_is_barred() -> None:
    rng = random.Random(3)

    def some(count: int) -> list[str]:
        return list(
            {"".join(rng.choice("ab<") for _ in range(rng.randint(1, 4))): 0 for _ in range(rng.randint(1, count))}
        )

    for _ in range(25):
        barred, markers = some(3), some(2)
        without, until = python(text_without(barred)), text_until(markers[0], markers, barred)
        for length in range(6):
            for letters in itertools.product("ab<x", repeat=length):
                text = "".join(letters)
                clean = not any(one in text for one in barred)
                assert bool(without.fullmatch(text)) == clean
                ended = [i for i in range(1, length + 1) if any(text[:i].endswith(one) for one in markers)]
                longest = max((one for one in markers if text.endswith(one)), key=len, default=None)
                first = clean and ended[:1] == [length] and longest == markers[0]
                assert (until is not None and bool(python(until).fullmatch(text))) == first, (markers, barred, text)
    with pytest.raises(TooLongError):
        text_without(["".join(rng.choice("ab") for _ in range(10)) for _ in range(30)])


@pytest.mark.parametrize(("whitespace", "taken"), [("compact", [True, False, False]), ("flexible", [True, True, True])])
def test_whitespace_is_one_space_or_a_bounded_choice(whitespace: str, taken: list[bool]) -> None:
    matcher = schema({"type": "object", "properties": {"a": {"const": [1, 2]}}}, whitespace=whitespace)
    texts = ['{"a": [1, 2]}', '{\n  "a" :[1,2] }', '{"a": [1,2]}']
    assert [takes(matcher, text.encode()) for text in texts] == taken
    assert not takes(matcher, b"{" + b" " * 9 + b"}")
    assert takes(matcher, b"{" + b" " * 8 + b"}") == (whitespace == "flexible")


def test_json_object_is_nested_to_a_bounded_depth() -> None:
    matcher = compiled("json_object", "")
    for value in ({}, {"a": [1, -2.5e3, None]}, {"é\n": {"b": "x"}, "c": True}):
        assert takes(matcher, text_of(value))
    for text in ("[]", '{"a": [[1]]}', '{"a": 01}', '{"a": 1,"b": 2}', '{"a": "\n"}', "{a: 1}"):
        assert not takes(matcher, text.encode())


def test_what_a_schema_says_nothing_of_is_nested_twice_at_most() -> None:
    matcher = schema(True)
    assert takes(matcher, b'[{"a": 1}, [2]]')
    assert not takes(matcher, b"[[[1]]]")


def test_properties_come_in_order_and_optional_ones_may_be_missing() -> None:
    names = "abc"
    for needed in itertools.product([False, True], repeat=3):
        required = [name for name, is_needed in zip(names, needed, strict=True) if is_needed]
        properties = {name: {"const": 1} for name in names}
        matcher = schema({"type": "object", "properties": properties, "required": required})
        for present in itertools.product([False, True], repeat=3):
            value = {name: 1 for name, is_there in zip(names, present, strict=True) if is_there}
            assert takes(matcher, text_of(value)) == (set(required) <= set(value))
    assert not takes(matcher, b'{"b": 1, "a": 1, "c": 1}')


def test_arrays_of_every_length() -> None:
    for heads, least, most, rest in itertools.product(range(3), range(3), [None, 0, 1, 3], [True, False]):
        rule = {"type": "array", "prefixItems": [{"const": i} for i in range(heads)], "minItems": least}
        rule |= {"items": {"const": 9} if rest else False} | ({} if most is None else {"maxItems": most})
        fitting = [n for n in range(6) if n >= least and (most is None or n <= most) and (rest or n <= heads)]
        if not fitting:
            assert "no text satisfies this json_schema" in refusal("json_schema", json.dumps(rule))
            continue
        matcher = schema(rule)
        values = [[*range(min(n, heads)), *[9] * (n - heads)] for n in range(6)]
        assert [n for n in range(6) if takes(matcher, text_of(values[n]))] == fitting, rule


def test_structural_tags_within_text() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": {"const": 1}},
                    "end": "</f>",
                }
            ],
        },
    }
    matcher = compiled("structural_tag", json.dumps(tag))
    for text in ("", "hi < f", "a<f>1</f>b", "<f>1</f><f>1</f>"):
        assert takes(matcher, text.encode()), text
    for text in ("<f", "<f>2</f>", "a<f>1b", "<fx"):
        assert not takes(matcher, text.encode()), text


A = {"type": "const_string", "value": "a."}
TAG = {"type": "tag", "begin": "<", "content": A, "end": ">"}
SEPARATED = {"type": "tags_with_separator", "separator": ",", "tags": [TAG]}
FORMATS = [
    ({"type": "sequence", "elements": [A, {"type": "regex", "pattern": "b|bc"}]}, ["a.b", "a.bc"], ["axb", "a."]),
    ({"type": "or", "elements": [A, {"type": "regex", "pattern": "b"}]}, ["a.", "b"], ["", "a.b"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": A}, ["a.", "a.a."], ["", "a.a.a."]),
    ({"type": "repeat", "min": 1, "max": -1, "content": A}, ["a.", "a.a.a."], [""]),
    ({"type": "star", "content": A}, ["", "a.a."], ["b"]),
    ({"type": "plus", "content": A}, ["a.", "a.a."], [""]),
    ({"type": "optional", "content": A}, ["", "a."], ["a.a."]),
    ({"type": "any_text", "max_chars": 2}, ["", "世\n"], ["abc"]),
    ({"type": "any_text", "excludes": ["ab"]}, ["", "ba"], ["cabc"]),
    (TAG | {"content": {"type": "any_text"}, "end": [">", "!"]}, ["<>", "<a!"], ["<a>b>", "<a"]),
    (SEPARATED | {"at_least_one": True}, ["<a.>", "<a.>,<a.>"], ["", "<a.>,", "<a.><a.>"]),
    (SEPARATED | {"stop_after_first": True}, ["", "<a.>"], ["<a.>,<a.>"]),
]


@pytest.mark.parametrize(
    ("node", "texts", "others"), FORMATS, ids=lambda value: "" if isinstance(value, list) else value["type"]
)
def test_formats_of_structural_tags(node: dict[str, Any], texts: list[str], others: list[str]) -> None:
    matcher = compiled("structural_tag", json.dumps({"type": "structural_tag", "format": node}))
    assert [takes(matcher, text.encode()) for text in texts] == [True] * len(texts)
    assert [takes(matcher, text.encode()) for text in others] == [False] * len(others)


def test_schemas_in_structural_tags_are_reported_with_their_place() -> None:
    unique = {"type": "array", "uniqueItems": True}
    tag = {
        "format": {"type": "tag", "begin": "a", "content": {"type": "json_schema", "json_schema": unique}, "end": "b"}
    }
    constraint = Constraint(kind="structural_tag", value=json.dumps(tag))
    place = "#/format/content/json_schema/uniqueItems"
    assert BACKEND.unenforced(constraint) == [(place, "outlines ignores uniqueItems")]


def test_special_tokens_are_refused_in_structural_tags() -> None:
    tag = {"format": {"type": "const_string", "value": "a<end>"}}
    assert "#/format/value: outlines writes text only, and '<end>' is a special token" in refusal(
        "structural_tag", json.dumps(tag)
    )
    assert "#/format: outlines writes text only" in refusal(
        "structural_tag", '{"format": {"type": "token", "token": 0}}'
    )
    both = '{"format": {"type": "any_text", "excludes": ["a"], "max_chars": 3}}'
    assert "cannot both count the characters" in refusal("structural_tag", both)


REFUSED = [
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}}', "#/items/$ref: '#' refers to what it is a part of"),
    ("json_schema", '{"$ref": "#/$defs/x"}', "'#/$defs/x' is nothing in this schema"),
    ("json_schema", "false", "no text satisfies this json_schema"),
    ("json_schema", '{"enum": []}', "no text satisfies this json_schema"),
    ("json_schema", '{"minimum": 3, "maximum": 2, "type": "integer"}', "no text satisfies this json_schema"),
    ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "no text satisfies this json_schema"),
    ("json_schema", '{"type": "string", "maxLength": 1000000}', "its counts written out, the pattern has"),
    ("json_schema", '{"type": "array", "maxItems": 1000000}', "its counts written out, the pattern has"),
    ("json_schema", "3", "a JSON schema is an object, true or false"),
    ("regex", "(a{0,1000}){0,1000}", "its counts written out, the pattern has 1,000,000 characters"),
    ("regex", r"a[^\s\S]", "no text satisfies a part of it"),
    ("regex", "(", "not a regular expression"),
    ("regex", r"(a)\1", "a backreference cannot be enforced"),
    ("ebnf", 'root ::= "a"', "outlines has no ebnf"),
    ("lark", 'start: "a"', "outlines has no lark"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "why"), REFUSED, ids=lambda value: value[:40])
def test_refusals_say_why(kind: str, value: str, why: str) -> None:
    assert why in refusal(kind, value)


def test_references_that_multiply_are_refused_quickly() -> None:
    names = [f"d{i}" for i in range(40)]
    defs = {
        a: {"type": "object", "properties": {k: {"$ref": f"#/$defs/{b}"} for k in "xy"}}
        for a, b in itertools.pairwise(names)
    }
    bomb = {"$ref": "#/$defs/d0", "$defs": defs | {names[-1]: {"const": 1}}}
    assert "the schema is too large for an automaton" in refusal("json_schema", json.dumps(bomb))


def test_a_model_without_an_end_token_is_refused() -> None:
    spec = ModelSpec("toy", 257, 4096, (LayerSpec(1, 4, 4),), eos_token_ids=())
    with pytest.raises(PluginError, match="outlines needs an end token"):
        Outlines(Outlines.Options(), PluginContext("grammar", "outlines", model=spec, tokenizer=tokenizer_of(BYTES)))


def test_forced_bytes_are_what_every_continuation_begins_with() -> None:
    matcher = schema({"type": "object", "properties": {"é": {"enum": ["世界", "世人"]}}, "required": ["é"]}).fork()
    written = b""
    for forced, then in (('{"é": "世'.encode(), "界".encode()), (b'"}', b"")):
        known = matcher.forced()
        assert known.startswith(forced)
        for byte in known + then[len(known) - len(forced) :]:
            assert matcher.accept(byte + 1)
            written += bytes([byte])
    assert written.decode() == '{"é": "世界"}'
    assert matcher.forced() == b""
    assert compiled("regex", "a(b)?").forced() == b"a"
    assert compiled("regex", "ab|ac").forced() == b"a"
    assert compiled("regex", "b?").forced() == b""
    assert len(compiled("regex", "a{1000}").forced()) == 256


def test_long_tokens_lead_where_their_bytes_lead() -> None:
    grammar = backend("outlines", [b"a", b"b", b"ab", b'{"'])
    constraint = Constraint(kind="regex", value="abab")
    matcher = grammar.matcher(constraint, grammar.compile(constraint))
    assert allowed(matcher, 5) == {1, 3}
    assert matcher.accept(3)
    assert matcher.accept(1)
    assert allowed(matcher, 5) == {2}
    assert matcher.forced() == b"b"
    assert matcher.accept(2)
    assert matcher.is_complete()
    assert allowed(matcher, 5) == {END}


def test_an_end_can_be_taken_back() -> None:
    matcher = compiled("regex", "ab?").fork()
    assert not matcher.accept(END)
    assert matcher.accept(ord("a") + 1)
    assert matcher.accept(END)
    assert matcher.is_complete()
    assert not matcher.accept(ord("b") + 1)
    assert not matcher.accept(-1)
    matcher.rollback(1)
    assert matcher.accept(ord("b") + 1)
    with pytest.raises(ValueError, match="cannot take back 3 of 2 tokens"):
        matcher.rollback(3)


def test_masks_are_remembered_within_bounds() -> None:
    automaton = Automaton.load(BACKEND.compile(Constraint(kind="regex", value="a{300}")))
    end = allowed_row = None
    for state in range(300):
        allowed_row = automaton.row(state, 9, BACKEND._end_row)  # type: ignore[attr-defined]
        end = end if end is not None else allowed_row
    assert len(automaton._rows) <= max(64, 4 * 1024**2 // (9 * 4))
    wide = Automaton.load(BACKEND.compile(Constraint(kind="regex", value="a{100}")))
    for state in range(100):
        wide.row(state, 100_000, 0)  # type: ignore[arg-type]
    assert len(wide._rows) == 64


def test_sizes_are_counted_with_counts_written_out() -> None:
    assert expanded_size("abc") == 3
    assert expanded_size("(?:ab){10}c") == 21
    assert expanded_size(r"[a\]]{2,5}\p{Nd}\u{22}") == 7
    assert expanded_size("a{3,}") == 4
    assert expanded_size("((a{10}){10}){10}") == 1000


@pytest.mark.parametrize(
    ("pattern", "longest", "endless"),
    [
        (rx.NUMBER, f"-{2**64}.{'1' * 17}e-308", ("1" * 21, f"0.{'0' * 18}", "1e1000")),
        (number(Decimal(0), Decimal("1.5"), above=True), f"1.4{'9' * 16}", (f"0.{'3' * 40}", f"0.{'0' * 40}1")),
        (number(Decimal(7), None), f"{2**64}.{'1' * 17}", ("1" * 21, f"8.{'0' * 18}", f"7.{'0' * 18}")),
        (rx.integer(None, 5), f"-{2**64}", (f"-{'1' * 21}",)),
        (rx.integer(10**30, None), str(10**30 + 1), ("1" * 40,)),
    ],
)
def test_numbers_end(pattern: str, longest: str, endless: tuple[str, ...]) -> None:
    assert re.fullmatch(pattern, longest)
    assert not any(re.fullmatch(pattern, text) for text in endless)
