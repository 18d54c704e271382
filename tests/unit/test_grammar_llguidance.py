"""The backend llguidance: exact vocabulary, schemas, regexes, Lark, ends, errors that stay bounded, attacks."""

from __future__ import annotations

import json
import random
import re
import time
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grammar_corpus import CASES, Case, text_of
from grammar_rig import BYTES, END, allowed, backend, takes
from jsonschema import Draft202012Validator

from phloem.constraint import Constraint
from phloem.errors import PluginError, RequestError
from phloem.interfaces import Grammar, Matcher, PluginContext, TokenizerData
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.grammar.llguidance import LLGuidance
from phloem.testing.grammar import toy_tokenizer
from phloem.testing.plugin import TOY_SPEC
from phloem.tokenizer import Tokenizer

SIZE = len(BYTES) + 1


@cache
def grammar() -> Grammar:
    return backend("llguidance")


def matcher(kind: str, value: Any, **fields: Any) -> Matcher:
    text = value if isinstance(value, str) and kind != "choices" else json.dumps(value)
    constraint = Constraint(kind=kind, value=text, **fields)
    return grammar().matcher(constraint, grammar().compile(constraint))


def refusal(kind: str, value: Any, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        matcher(kind, value, **fields)
    assert caught.value.param == kind
    return caught.value.message


def walk(start: Matcher, rng: random.Random, most: int = 400) -> bytes | None:
    """A random text under the masks, drawn to its end; None if it is not found in `most` bytes."""
    walker, text = start.fork(), b""
    while len(text) < most:
        ids = sorted(allowed(walker, SIZE))
        if walker.is_complete() or (END in ids and rng.random() < 0.5):
            return text
        ids = [token for token in ids if token != END]
        plain = [token for token in ids if 32 <= token - 1 < 127]
        closing = [token for token in plain if chr(token - 1) in '"]}']
        token = rng.choice(closing if closing and len(text) > 60 and rng.random() < 0.8 else plain or ids)
        assert walker.accept(token)
        text += bytes([token - 1])
    return None


# --- the vocabulary


def test_tokens_are_the_models(hf_folder: Callable[[str], Path]) -> None:
    """Every token of a real vocabulary has our bytes, in a model with more rows than tokens and several ends."""
    data = (hf_folder("smollm2-135m") / "tokenizer.json").read_text()
    tokenizer = Tokenizer(TokenizerData(data, special_tokens={"eos_token": "<|im_end|>"}))
    spec = ModelSpec("padded", 49_160, 64, (LayerSpec(1, 4, 4),), eos_token_ids=(2, 0))
    plugin = LLGuidance(LLGuidance.Options(), PluginContext("grammar", "llguidance", model=spec, tokenizer=tokenizer))
    inner = plugin._tokenizer
    plain = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
    assert [token for token in plain if inner.decode_bytes([token]) != tokenizer.token_bytes(token)] == []
    assert (inner.vocab_size, sorted(inner.eos_tokens)) == (49_160, [0, 2])
    constraint = Constraint(kind="regex", value=r"(.|\n)*")
    free = plugin.matcher(constraint, plugin.compile(constraint))
    whole = {token for token in plain if tokenizer.token_bytes(token).decode(errors="ignore")}
    assert {token for token in allowed(free, 49_160) if token in whole} >= {
        token for token in whole if _is_text(tokenizer.token_bytes(token))
    }
    assert allowed(free, 49_160) & (tokenizer.special_ids | set(range(49_152, 49_160))) == {0, 2}


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def test_masks_allow_every_spelling_of_forced_text() -> None:
    """Not only the library's own, which would forbid what the model would rather write."""
    plugin = backend("llguidance", (b"h", b"e", b"he", b"hello", b"llo", b"<end>"))
    constraint = Constraint(kind="regex", value="hello")
    start = plugin.matcher(constraint, plugin.compile(constraint))
    assert allowed(start, 7) == {1, 3, 4}
    assert start.forced() == b"hello"


def test_text_that_spells_a_special_token_is_not_that_token() -> None:
    context = PluginContext("grammar", "llguidance", model=TOY_SPEC, tokenizer=toy_tokenizer())
    plugin = LLGuidance(LLGuidance.Options(), context)
    constraint = Constraint(kind="lark", value='start: "a" "<pad>"? | "b" <pad> "c"')
    start = plugin.matcher(constraint, plugin.compile(constraint))
    twin = start.fork()
    assert start.accept(2)
    assert 1 not in allowed(start, 32)
    assert twin.accept(3)
    assert allowed(twin, 32) == {1}
    assert twin.forced() == b""


def test_tokens_of_equal_bytes_are_both_allowed() -> None:
    """As in byte-fallback vocabularies: a letter, and its byte."""
    vocab = {"<end>": 0, "a": 1, "<0x61>": 2, "b": 3}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    data = {"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteFallback"}, "model": model}
    spec = ModelSpec("toy", 4, 64, (LayerSpec(1, 4, 4),), eos_token_ids=(END,))
    tokenizer = Tokenizer(TokenizerData(json.dumps(data | empty)))
    plugin = LLGuidance(LLGuidance.Options(), PluginContext("grammar", "llguidance", model=spec, tokenizer=tokenizer))
    constraint = Constraint(kind="regex", value="a")
    assert allowed(plugin.matcher(constraint, plugin.compile(constraint)), 4) == {1, 2}


def test_a_model_without_end_tokens_is_refused() -> None:
    spec = ModelSpec("endless", 32, 64, (LayerSpec(1, 4, 4),))
    context = PluginContext("grammar", "llguidance", model=spec, tokenizer=toy_tokenizer())
    with pytest.raises(PluginError, match="llguidance needs an end token"):
        LLGuidance(LLGuidance.Options(), context)


# --- the matcher


def test_ends_are_counted_and_taken_back() -> None:
    start = matcher("regex", "ab?")
    assert not start.accept(END)
    assert start.accept(1 + ord("a"))
    assert start.accept(END)
    assert start.accept(END)
    assert allowed(start, SIZE) == {END}
    assert start.is_complete()
    assert start.forced() == b""
    assert not start.accept(1 + ord("b"))
    start.rollback(2)
    assert not start.is_complete()
    assert start.accept(1 + ord("b"))
    assert start.is_complete()
    start.rollback(2)
    with pytest.raises(ValueError, match="cannot take back 1 of 0 tokens"):
        start.rollback(1)


def test_a_dead_end_is_an_empty_mask_that_can_be_left() -> None:
    """The library calls it an error, and would never leave it."""
    plugin = backend("llguidance", (b"a", b"b"))
    constraint = Constraint(kind="regex", value="a(b|xy)|ax|b")
    start = plugin.matcher(constraint, plugin.compile(constraint))
    dead = plugin.matcher(
        Constraint(kind="regex", value="ax|b"), plugin.compile(Constraint(kind="regex", value="ax|b"))
    )
    assert dead.accept(1)
    assert allowed(dead, 3) == frozenset()
    dead.rollback(1)
    assert allowed(dead, 3) == {1, 2}
    assert start.accept(1)
    assert allowed(start, 3) == {2}


def test_tokens_out_of_range_are_refused() -> None:
    start = matcher("regex", "a*")
    assert not start.accept(-1)
    assert not start.accept(10**6)
    assert start.accept(1 + ord("a"))


def test_rollback_goes_as_far_as_the_start() -> None:
    start = matcher("regex", "(ab)*")
    before = allowed(start, SIZE)
    for byte in b"ab" * 300:
        assert start.accept(1 + byte)
    start.rollback(600)
    assert allowed(start, SIZE) == before


def test_limits_met_while_a_text_grows_fail_that_request() -> None:
    start = matcher("regex", "((a{1,100}){1,100}){1,100}")
    with pytest.raises(RequestError, match="regex: lexer error: too many expressions") as caught:
        _advance(start, b"a" * 10_000)
    assert caught.value.param == "regex"


def _advance(start: Matcher, text: bytes) -> None:
    """Byte by byte, with a mask before each."""
    for byte in text:
        assert byte + 1 in allowed(start, SIZE)
        assert start.accept(byte + 1)


# --- schemas


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_corpus(case: Case) -> None:
    constraint = Constraint(kind="json_schema", value=json.dumps(case.schema))
    reported = grammar().unenforced(constraint)
    try:
        start = grammar().matcher(constraint, grammar().compile(constraint))
    except RequestError:
        return  # refused, with what the library says
    missed = [instance for instance in case.valid if not takes(start, text_of(instance))]
    taken = [instance for instance in case.invalid if takes(start, text_of(instance))]
    assert missed == [] or reported
    assert taken == [] or reported


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A random satisfiable schema of what the backend enforces."""
    leaves: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": rng.randrange(-50, 5), "maximum": rng.randrange(5, 2000)},
        lambda: {"type": "number", "exclusiveMinimum": -rng.random() * 9, "maximum": round(rng.random() * 9, 3)},
        lambda: {"type": "integer", "multipleOf": rng.randrange(2, 9)},
        lambda: {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 6)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-c]+x?$", "b", r"^\d{2}-\w$"]), "maxLength": 5},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "date-time", "ipv4", "uuid", "email"])},
        lambda: {"enum": rng.sample(["a", 'q"', 1, 2.5, None, True, [1], {"k": "v"}], 3)},
        lambda: {"type": rng.choice([["boolean", "null"], "boolean", "null"])},
        lambda: {"const": rng.choice(["é", {"a": [1, {}]}, -1])},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)()
    below = [_schema(rng, depth - 1) for _ in range(3)]
    names = rng.sample(["a", "b", 'c"', "dé"], 3)
    return rng.choice(
        [
            {"type": "array", "items": below[0], "minItems": rng.randrange(2), "maxItems": 2},
            {"type": "array", "prefixItems": below[:2], "items": False, "minItems": 1},
            {
                "type": "object",
                "properties": dict(zip(names, below, strict=True)),
                "required": names[:2],
                "additionalProperties": rng.choice([False, {"type": "null"}]),
            },
            {"type": "object", "patternProperties": {"^x[0-9]$": below[0]}, "additionalProperties": False},
            {"anyOf": below[:2]},
            {"allOf": [below[0], {}]},
            {"$ref": "#/$defs/t", "$defs": {"t": below[0]}} if depth == 2 else below[0],
        ]
    )


def test_random_schemas_are_satisfied() -> None:
    rng, done = random.Random(0), 0
    for _ in range(80):
        schema = _schema(rng, 2)
        start = matcher("json_schema", schema)
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for _ in range(3):
            text = walk(start, rng)
            if text is not None:
                done += 1
                validator.validate(json.loads(text))
    assert done > 150


def test_whitespace_is_compact_or_flexible_within_bounds() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "additionalProperties": False}
    mine = schema | {"x-guidance": {"whitespace_flexible": True}}
    compact, flexible = matcher("json_schema", mine), matcher("json_schema", schema, whitespace="flexible")
    assert takes(compact, b'{"a": [1, 2]}')
    for loose in (b'{"a":[1,2]}', b'{\n  "a" : [ 1 ]\n}', b'{"a": [ ]}'):
        assert not takes(compact, loose)
        assert takes(flexible, loose)
    assert not takes(flexible, b'{     "a": []}')


def test_an_escaped_name_is_no_way_around_its_schema() -> None:
    start = matcher("json_schema", {"type": "object", "properties": {"a": {"const": 1}}})
    assert takes(start, b'{"a": 1, "b": 2}')
    assert not takes(start, rb'{"\u0061": 2}')
    assert not takes(start, b'{"a": 1, "a": 2}')


def test_what_could_be_written_as_an_escape_only_is_refused() -> None:
    for schema in ({"enum": ["a", ["\x01"]]}, {"const": "\x7f"}, {"properties": {"\x00": True}}):
        assert refusal("json_schema", schema).startswith("a value has a control character")
    assert takes(matcher("json_schema", {"enum": ["\n", "\\u0001"]}), rb'"\\u0001"')
    assert refusal("json_schema", {"const": "\ud800"}) == "json_schema has half of a surrogate pair"


def test_any_object() -> None:
    start = matcher("json_object", "")
    assert takes(start, b'{"a": {"b": [1, null]}}')
    assert not takes(start, b"[]")


def test_not_strict_leaves_out_what_is_reported() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    constraint = Constraint(kind="json_schema", value=json.dumps(schema), strict=False)
    assert [tuple(each) for each in grammar().unenforced(constraint)] == [
        ("#/uniqueItems", "llguidance ignores uniqueItems")
    ]
    assert takes(matcher("json_schema", schema, strict=False), b"[1, 1]")
    assert refusal("json_schema", schema) == 'json_schema: Unimplemented keys: ["uniqueItems"]'


def test_repeated_additional_properties_are_reported() -> None:
    schema = {"type": "object", "additionalProperties": True, "minProperties": 2}
    found = grammar().unenforced(Constraint(kind="json_schema", value=json.dumps(schema)))
    assert [tuple(each) for each in found] == [
        ("#/minProperties", "llguidance counts an additional property twice if it is repeated")
    ]


# --- regexes


@pytest.mark.parametrize(
    ("pattern", "what", "at"),
    [
        ("a(?=b)", "a lookahead", 1),
        ("(?<!b)a", "a lookbehind", 0),
        (r"(a)\1", "a backreference", 3),
        ("(?P<x>a)(?P=x)", "a backreference", 8),
        ("(a)?(?(1)b|c)", "a condition on a group", 4),
        (r"\bfoo", r"the boundary \b", 0),
        ("a*+", "a possessive quantifier", 2),
        ("(?>a)", "an atomic group", 0),
        ("(?m)^a", "the flags of (?m)", 0),
        ("a^b", "an anchor of the start", 1),
        ("(a$)b", "an anchor of the end", 2),
        ("(?:^)*a", "a repeated anchor", 3),
    ],
)
def test_what_is_not_regular_is_refused_with_its_position(pattern: str, what: str, at: int) -> None:
    assert refusal("regex", pattern) == f"{what} cannot be enforced (character {at})"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression: missing ), unterminated subpattern at position 0"),
        ("(" * 101 + ")" * 101, "groups are nested more than 100 deep"),
        ("\\ud800", "U+D800 is half of a surrogate pair"),
        ("[^\\x00-\\U0010ffff]", "no text satisfies this regex"),
    ],
)
def test_what_is_no_regex_is_refused(pattern: str, message: str) -> None:
    assert refusal("regex", pattern) == message


def test_regexes_match_what_python_matches() -> None:
    rng = random.Random(3)
    atoms = [
        *"abc1é_ ",
        ".",
        "[ab]",
        "[^a]",
        r"\d",
        r"\w",
        r"\s",
        r"\W",
        r"[\dx-]",
        r"[^\w]",
        r"\n",
        r"\x1c",
        "()",
        "[]a]",
    ]

    def pattern(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(atoms)
        left, right = pattern(depth - 1), pattern(depth - 1)
        repeat = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{,2}", "*?", "??"])
        return rng.choice([left + right, f"(?:{left}|{right})", f"({left}|)", f"(?:{left}){repeat}", f"(?i:{left})"])

    for _ in range(150):
        source = rng.choice(["", "^", "(?i)", "(?s)"]) + pattern(3) + rng.choice(["", "$"])
        start = matcher("regex", source)
        for _ in range(5):
            text = "".join(rng.choice("abcAB1é \n_x-\x1c") for _ in range(rng.randrange(5)))
            assert takes(start, text.encode()) == bool(re.fullmatch(source, text)), (source, text)


@pytest.mark.parametrize("pattern", [r"\w", r"\d", r"\s", r"\W"])
def test_classes_are_pythons(pattern: str) -> None:
    """On characters below U+3000, but not those that this Python's Unicode does not know yet."""
    start = matcher("regex", pattern)
    for char in map(chr, (*range(0x180), *range(0x180, 0x3000, 5))):
        if unicodedata.category(char) != "Cn":
            assert takes(start, char.encode()) == bool(re.fullmatch(pattern, char)), hex(ord(char))


def test_the_empty_regex_is_the_empty_text() -> None:
    start = matcher("regex", "")
    assert start.is_complete()
    assert allowed(start, SIZE) == {END}


# --- Lark and choices


def test_choices_are_texts() -> None:
    texts = ["a/b", 'q"\\\n', "é", "a", "%json {", "// no comment"]
    start = matcher("choices", texts)
    for text in texts:
        assert takes(start, text.encode())
    assert not takes(start, b"a/")


def test_lark_keeps_its_lines_and_json_our_whitespace() -> None:
    start = matcher("lark", '// a comment %json { "a"\nstart: "%json {" %json {\n"type": "array"} | %json { }')
    assert takes(start, b"%json {[1, 2]")
    assert not takes(start, b"%json {[1,2]")
    assert takes(start, b"null")
    assert refusal("lark", 'start: a\n\na: "x" b') == 'lark: at 3(4): unknown name: "b"'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "lark: no start rule found"),
        ('{"grammars": []}', "lark: "),
        ('start: a\na[temperature=0.5]: "x"', "lark: line 2: temperature is not supported"),
        ('start: a\n\na[lazy, max_tokens=3]: "x"', "lark: line 3: max_tokens is not supported"),
        ('%llguidance {"no_forcing": false}\nstart: "x"', "lark: line 1: %llguidance is not supported"),
        ("start: @other", "lark: line 1: @other is not supported"),
        ('start: %json {"type": "array", "uniqueItems": true}', "Unimplemented keys"),
    ],
)
def test_what_lark_lacks_is_refused(source: str, message: str) -> None:
    assert message in refusal("lark", source)


def test_kinds_of_other_backends_are_refused() -> None:
    assert refusal("ebnf", 'root ::= "a"') == "llguidance has no ebnf"


# --- attacks: each is refused, or costs little, and so does each of its masks

_STRING = {"type": "string"}


def _nested(depth: int, kind: str) -> Any:
    schema: Any = _STRING
    for _ in range(depth):
        schema = (
            {"type": "array", "items": schema}
            if kind == "items"
            else {kind: [schema, {"type": "array", "items": schema}]}
        )
    return schema


ATTACKS: list[tuple[str, str, Any]] = [
    ("nested stars", "regex", "(a+)+b"),
    ("ambiguous stars", "regex", "((a|aa)*)*b"),
    ("nested counts", "regex", "((a{1,100}){1,100}){1,100}"),
    ("large counts", "regex", r"(.{0,1000}x){0,1000}[\s\S]{1000000}"),
    ("exponential automaton", "regex", "(.|\n)*1.{200}x"),
    ("many options", "regex", "(?i)" + "(a)?(b)?(c)?(d)?" * 100),
    ("deep groups", "regex", "(" * 5000 + ")" * 5000),
    ("many words", "choices", [f"w{i}x" for i in range(5000)]),
    ("maxItems", "json_schema", {"type": "array", "items": {"type": "array", "maxItems": 10**9}, "maxItems": 10**9}),
    ("minItems", "json_schema", {"type": "array", "minItems": 10**9}),
    ("maxLength", "json_schema", {"type": "string", "maxLength": 10**9}),
    ("huge number", "json_schema", {"type": "string", "maxLength": 10**30}),
    ("$ref to itself", "json_schema", {"$ref": "#"}),
    (
        "$ref in a circle",
        "json_schema",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    ("endless object", "json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    (
        "doubling $ref",
        "json_schema",
        {
            "$defs": {**{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}, "d60": _STRING},
            "$ref": "#/$defs/d0",
        },
    ),
    ("deep", "json_schema", _nested(500, "items")),
    ("nested oneOf", "json_schema", _nested(10, "oneOf")),
    ("nested anyOf", "json_schema", _nested(12, "anyOf")),
    ("empty enum", "json_schema", {"enum": []}),
    ("unsatisfiable", "json_schema", {"type": "integer", "minimum": 5, "maximum": 2}),
    ("false", "json_schema", False),
    ("many properties", "json_schema", {"type": "object", "properties": {f"p{i}": _STRING for i in range(5000)}}),
    ("some properties", "json_schema", {"type": "object", "properties": {f"p{i}": _STRING for i in range(800)}}),
    ("large enum", "json_schema", {"enum": [f"v{i}" for i in range(20_000)]}),
    ("range", "json_schema", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    ("multipleOf", "json_schema", {"type": "integer", "multipleOf": 10**9 + 7}),
    (
        "intersections",
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f".*{c}.*x.{{20}}y"} for c in "abcdefgh"]},
    ),
    ("ambiguous Lark", "lark", 'start: a\na: a a | "x" | ""'),
    ("endless Lark", "lark", 'start: a\na: "x" a'),
    ("deep Lark", "lark", "start: " + "(" * 3000 + '"x"' + ")" * 3000),
    ("repeated Lark", "lark", 'start: a{1,100000}\na: b{1,100000}\nb: "x"{1,100000} "y"'),
    (
        "repeated tags",
        "structural_tag",
        {
            "format": {
                "type": "repeat",
                "min": 10**6,
                "max": 10**9,
                "content": {
                    "type": "tag",
                    "begin": "a",
                    "content": {"type": "json_schema", "json_schema": _STRING},
                    "end": "b",
                },
            }
        },
    ),
    (
        "many triggers",
        "structural_tag",
        {
            "format": {
                "type": "triggered_tags",
                "triggers": [f"<f{i}=" for i in range(100)],
                "tags": [
                    {"type": "tag", "begin": f"<f{i}=>", "content": {"type": "any_text"}, "end": "</f>"}
                    for i in range(100)
                ],
            }
        },
    ),
]


@pytest.mark.parametrize(("kind", "value"), [attack[1:] for attack in ATTACKS], ids=[attack[0] for attack in ATTACKS])
def test_attacks_are_bounded(kind: str, value: Any) -> None:
    """Seconds of this thread's processor: 3 to compile (0.4 is the most seen), 0.5 for a mask (0.05)."""
    rng, began = random.Random(0), time.thread_time()
    text = value if isinstance(value, str) else json.dumps(value)
    constraint = Constraint(kind=kind, value=text)
    spent, refused = [], None
    try:
        walker = grammar().matcher(constraint, grammar().compile(constraint))
        spent.append(time.thread_time() - began)
        for _ in range(30):
            began = time.thread_time()
            ids = sorted(allowed(walker, SIZE) - {END})
            assert not ids or walker.accept(rng.choice(ids))
            spent.append(time.thread_time() - began)
    except RequestError as error:
        refused = error.param
        spent.append(time.thread_time() - began)
    assert refused in (None, kind)
    assert spent[0] < 3
    assert max(spent[1:], default=0) < 0.5
