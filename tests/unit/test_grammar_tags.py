"""Structural tags: what is refused and where; the language of a tag, handwritten and as xgrammar has it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grammar_rig import BYTES, END, backend, takes
from grammar_rig import allowed as allowed_of

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import Grammar, Matcher, PluginContext, TokenizerData
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.grammar import _tags
from phloem.plugins.grammar.llguidance import LLGuidance
from phloem.registry import Registry
from phloem.testing.grammar import allowed, toy_tokenizer
from phloem.testing.plugin import TOY_SPEC
from phloem.tokenizer import Tokenizer

Tree = dict[str, Any]
TEXT: Tree = {"type": "any_text"}
X: Tree = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


def const(value: str) -> Tree:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Tree:
    return {"type": "regex", "pattern": pattern}


def tag(begin: Any, content: Tree, end: Any) -> Tree:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def many(kind: str, *elements: Tree) -> Tree:
    return {"type": kind, "elements": list(elements)}


def around(kind: str, content: Tree, **fields: int) -> Tree:
    return {"type": kind, "content": content, **fields}


def triggered(triggers: list[str], *tags: Tree, **fields: Any) -> Tree:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **fields}


def separated(separator: str, *tags: Tree, **fields: bool) -> Tree:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": separator, **fields}


@cache
def grammar(name: str) -> Grammar:
    return backend(name)


def matcher(tree: Tree, name: str = "llguidance") -> Matcher:
    constraint = Constraint(kind="structural_tag", value=json.dumps({"type": "structural_tag", "format": tree}))
    return grammar(name).matcher(constraint, grammar(name).compile(constraint))


A, B = tag("<f=a>", const("1"), "</f>"), tag("<f=b>", X, "</f>")
LANGUAGES: list[tuple[Tree, list[str], list[str]]] = [
    (const('é\n"\\'), ['é\n"\\'], ["", "é"]),
    (many("sequence", const("a"), regex("b*"), const("c")), ["ac", "abbc"], ["ab", "abcc"]),
    (many("or", const("a"), const("ab"), X), ["a", "ab", '{"x": 1}'], ["abb", "{}"]),
    (around("optional", const("a")), ["", "a"], ["aa"]),
    (around("plus", X), ['{"x": 1}', '{"x": 1}{"x": 2}'], [""]),
    (around("star", many("sequence", const("a"), X)), ["", 'a{"x": 1}a{"x": 2}'], ["a"]),
    (around("repeat", const("ab"), min=1, max=2), ["ab", "abab"], ["", "ababab"]),
    (around("repeat", const("a"), min=2, max=-1), ["aa", "aaaaa"], ["a"]),
    (TEXT, ["", "any\n<text> é"], []),
    ({"type": "any_text", "excludes": ["ab", "é"]}, ["ba", "a"], ["xab", "é"]),
    ({"type": "any_text", "max_chars": 2}, ["", "éé"], ["abc"]),
    (many("sequence", TEXT, const("ab")), ["ab", "abab"], ["aba"]),
    (tag("<a>", TEXT, "</a>"), ["<a></a>", "<a></</a>"], ["<a>", "<a></a></a>", "<a>x</a"]),
    (tag("<a>", TEXT, ["</a>", "!"]), ["<a>x!", "<a>x</a>"], ["<a>x!!"]),
    (tag("<a>", many("or", TEXT, const("b")), "c"), ["<a>bc", "<a>xxc"], ["<a>xcc"]),
    (tag("<a>", X, ""), ['<a>{"x": 12}'], ["<a>", "<a>{}", '<a>{"x": 1} ']),
    (triggered(["<f="], A, B), ["", "<f", "x<f=a>1</f>y<f=b>" + '{"x": 1}</f>z', "<<f=a>1</f>"], ["<f=", "<f=a>1"]),
    (triggered(["<f="], A, B, at_least_one=True), ["<f=a>1</f>text"], ["", "x<f=a>1</f>", "text"]),
    (triggered(["<f="], A, B, stop_after_first=True), ["x", "x<f=a>1</f>"], ["<f=a>1</f>x"]),
    (triggered(["<f="], A, B, at_least_one=True, stop_after_first=True), ["<f=a>1</f>"], ["", "<f=a>1</f>x"]),
    (triggered(["<f="], A, excludes=["no"]), ["n o", "<f=a>1</f>n"], ["no", "<f=a>1</f>no"]),
    (triggered(["aa"], tag("aab", X, "")), ['aab{"x": 1}', 'xa!aab{"x": 1}a'], ['aaab{"x": 1}', "aa"]),
    (triggered(["ab", "b"], tag("ab", X, "."), tag("bc", const("2"), ".")), ['xab{"x": 1}.', "bc2."], ["abc2."]),
    (tag("<t>", triggered(["<f="], B), "</t>"), ['<t>a<f=b>{"x": 1}</f>b</t>'], ["<t>", "<t></t></t>", "<t>a</t>b"]),
    (
        tag("<t>", triggered(["<f="], B, stop_after_first=True), "</t>"),
        ['<t>a<f=b>{"x": 1}</f></t>', "<t></t>"],
        ["<t>"],
    ),
    (separated(",", A, B), ["", "<f=a>1</f>", '<f=b>{"x": 1}</f>,<f=a>1</f>'], ["<f=a>1</f>,", "<f=a>1</f><f=a>1</f>"]),
    (separated(",", A, at_least_one=True), ["<f=a>1</f>"], [""]),
    (separated(",", A, stop_after_first=True), ["", "<f=a>1</f>"], ["<f=a>1</f>,<f=a>1</f>"]),
    (separated("", tag("<a>", TEXT, "</a>")), ["<a>x</a><a></a>"], ["<a>x</a>,"]),
]


@pytest.mark.parametrize(("tree", "good", "bad"), LANGUAGES, ids=range(len(LANGUAGES)))
@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_language_of_a_tag(name: str, tree: Tree, good: list[str], bad: list[str]) -> None:
    start = matcher(tree, name)
    assert [text for text in good if not takes(start, text.encode())] == []
    assert [text for text in bad if takes(start, text.encode())] == []


def test_random_texts_as_xgrammar_has_them() -> None:
    """Random pieces of each tag's own texts, cut and joined: both backends stop at the same byte.

    Only in ASCII: within a character ours does not end, and has no byte that makes none; theirs does and has.
    """
    rng = random.Random(0)
    for tree, good, bad in LANGUAGES:
        ours, theirs = matcher(tree), matcher(tree, "xgrammar")
        texts = [text for text in good + bad if text.isascii()] + ["a"]
        pieces = [text[i:j] for text in texts for i in range(len(text)) for j in (i + 1, i + 3, len(text))]
        for _ in range(12):
            text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 5))).encode()
            assert _reach(ours, text) == _reach(theirs, text), (tree, text)


def _reach(start: Matcher, text: bytes) -> tuple[int, bool]:
    """How many bytes are taken, and whether the end is then."""
    walker = start.fork()
    taken = next((i for i, byte in enumerate(text) if not walker.accept(byte + 1)), len(text))
    return taken, walker.accept(END)


def test_masks_over_longer_tokens_are_xgrammars() -> None:
    """Tokens that straddle triggers, ends and JSON."""
    pieces = (*BYTES[:128], b"<f", b"=b", b"<f=b>{", b'x": ', b"1}</", b"}</f>y", b"</f><f=", b"text", b"> <")
    size = len(pieces) + 1
    tokens = {piece: i + 1 for i, piece in enumerate(pieces)}
    value = json.dumps({"format": tag("<t>", triggered(["<f="], A, B), "</t>")})
    constraint = Constraint(kind="structural_tag", value=value, whitespace="flexible")
    walkers = []
    for name in ("llguidance", "xgrammar"):
        one = backend(name, pieces)
        walkers.append(one.matcher(constraint, one.compile(constraint)))
    for piece in (b"<", b"t", b">", b"text", b"<f=b>{", b'"', b'x": ', b"1}</", b"f", b"> <", b"/", b"t", b">"):
        ours, theirs = (allowed_of(walker, size) for walker in walkers)
        assert ours == theirs, piece
        assert all(walker.accept(tokens[piece]) for walker in walkers)
    assert all(walker.accept(END) for walker in walkers)


def test_a_real_vocabulary_as_xgrammar_has_it(hf_folder: Callable[[str], Path]) -> None:
    """Tokenised texts of a tag, and the same texts broken off or spoilt, are taken to the same token."""
    data = (hf_folder("smollm2-135m") / "tokenizer.json").read_text()
    tokenizer = Tokenizer(TokenizerData(data, special_tokens={"eos_token": "<|im_end|>"}))
    spec = ModelSpec("real", tokenizer.vocab_size, 64, (LayerSpec(1, 4, 4),), eos_token_ids=(2,))
    tree = triggered(["<tool_call>"], tag('<tool_call>\n{"name": "f", "arguments": ', X, "}\n</tool_call>"))
    constraint = Constraint(kind="structural_tag", value=json.dumps({"format": tree}))
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 12}}\n</tool_call>'
    texts = [
        "",
        "Hello, wörld.",
        f"I call: {call} and {call}",
        call[:20],
        call.replace("12", '"12"'),
        f"{call}x</tool_call>",
    ]
    walkers = []
    for name in ("llguidance", "xgrammar"):
        plugin: Any = Registry().load("grammar", name)
        one = plugin(plugin.Options(), PluginContext("grammar", name, model=spec, tokenizer=tokenizer))
        walkers.append(one.matcher(constraint, one.compile(constraint)))
    for text in texts:
        ids = tokenizer.encode(text, add_special=False)
        ours, theirs = (_accepted(walker.fork(), [*ids, 2]) for walker in walkers)
        assert ours == theirs, text
        assert (ours == len(ids) + 1) == (text in (*texts[:3], texts[-1]))


def _accepted(walker: Matcher, ids: list[int]) -> int:
    return next((i for i, token in enumerate(ids) if not walker.accept(token)), len(ids))


def test_legacy_form_is_triggered_tags() -> None:
    value = {"structures": [{"begin": "<f=b>", "schema": X["json_schema"], "end": "</f>"}], "triggers": ["<f="]}
    assert _tags.parse(json.dumps(value)) == _tags.parse(json.dumps({"format": triggered(["<f="], B)}))


REFUSED: list[tuple[Any, str]] = [
    ("{", "structural_tag is not JSON"),
    ([], '#: must be an object of type "structural_tag"'),
    ({"type": "json"}, '#: must be an object of type "structural_tag"'),
    ({}, "#: must have format, or structures and triggers"),
    ({"format": TEXT, "x": 1}, "#/x: unknown field; known here: format, type"),
    ({"format": "any_text"}, "#/format: must be an object with a type"),
    (
        {"format": {"type": "grammar", "grammar": ""}},
        "#/format/type: 'grammar' is not a format here; these are: any_text",
    ),
    ({"format": {"type": "const_string"}}, "#/format: const_string needs value"),
    ({"format": const("a") | {"valve": 1}}, "#/format/valve: unknown field; known here: type, value"),
    ({"format": {"type": "const_string", "value": 1}}, "#/format/value: must be a string"),
    ({"format": many("sequence")}, "#/format/elements: must be a list with one format at least"),
    ({"format": many("or", TEXT, {"type": "x"})}, "#/format/elements/1/type: 'x' is not a format here"),
    ({"format": {"type": "any_text", "excludes": [""]}}, "#/format/excludes: must be a list of non-empty strings"),
    ({"format": {"type": "any_text", "max_chars": -1}}, "#/format/max_chars: must not be negative"),
    ({"format": around("repeat", TEXT, min=2, max=1)}, "#/format: repeat needs 0 <= min <= max"),
    ({"format": around("repeat", TEXT, min=0.5, max=1)}, "#/format/min: must be an integer"),  # type: ignore[arg-type]
    ({"format": {"type": "json_schema", "json_schema": []}}, "#/format/json_schema: must be a JSON schema"),
    ({"format": tag("<a>", TEXT, "")}, "#/format/end: must not be empty where the content is any text"),
    (
        {"format": tag("<a>", around("star", TEXT), [""])},
        "#/format/end: must not be empty where the content is any text",
    ),
    ({"format": tag("<a>", X, [])}, "#/format/end: must not be empty"),
    ({"format": tag("<a>", X, [1])}, "#/format/end/0: must be a string"),
    ({"format": separated(",")}, "#/format/tags: must be a list with one format at least"),
    ({"format": separated(",", TEXT)}, "#/format/tags/0: must be a tag, not any_text"),
    ({"format": triggered([], A)}, "#/format/triggers: must not be empty"),
    ({"format": triggered(["<f=", "<f=a"], A)}, "#/format/tags/0/begin: must start with one of the triggers"),
    ({"format": triggered(["<g"], A)}, "#/format/tags/0/begin: must start with one of the triggers, starts with none"),
    ({"format": triggered(["<f=", "<g"], A)}, "#/format/triggers: no tag begins with '<g'"),
    ({"format": triggered(["<f="], A, excludes=["x<f=a"])}, "#/format/excludes/0: holds a trigger"),
    ({"format": triggered(["<f="], A, at_least_one=1)}, "#/format/at_least_one: must be true or false"),
    ({"structures": [], "triggers": []}, "#/structures: must be a list with one structure at least"),
    ({"structures": [{"begin": "a"}], "triggers": []}, "#/structures/0: must be an object with begin, schema and end"),
    (
        {"structures": [{"begin": "a", "schema": "{", "end": ""}], "triggers": []},
        "#/structures/0/schema: must be a JSON",
    ),
    ({"format": {"type": "token", "token": True}}, "#/format/token: must be a token's text or id"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_no_tag_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        _tags.parse(value if isinstance(value, str) else json.dumps(value))
    assert message in refusal.value.message
    assert refusal.value.param == "structural_tag"


def test_tags_nested_too_deep_are_refused() -> None:
    tree = TEXT
    for _ in range(70):
        tree = around("optional", tree)
    with pytest.raises(RequestError, match="formats are nested more than 64 deep"):
        _tags.parse(json.dumps({"format": tree}))


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        (many("sequence", TEXT, X), "#/format"),  # where does the text end?
        (many("sequence", const("a"), many("sequence", regex("[{a]*"), X)), "#/format/elements/1"),
        (many("or", TEXT, X), "#/format"),
        (many("sequence", {"type": "json_schema", "json_schema": {"type": "number"}}, const("1")), "#/format"),
        (
            many("or", tag("<f", {"type": "json_schema", "json_schema": {"type": "array"}}, ""), tag("<f[", X, "")),
            "#/format",
        ),
    ],
)
def test_what_its_lexer_would_lose_llguidance_refuses(tree: Tree, place: str) -> None:
    with pytest.raises(RequestError) as refusal:
        matcher(tree)
    assert refusal.value.message.startswith(f"structural_tag: {place}: llguidance cannot tell where one part ends")


def special() -> Any:
    """llguidance over the toy vocabulary, where `<pad>` is a special token."""
    context = PluginContext("grammar", "llguidance", model=TOY_SPEC, tokenizer=toy_tokenizer())
    return LLGuidance(LLGuidance.Options(), context)


@pytest.mark.parametrize(
    ("tree", "good"),
    [
        (const("a<pad>b"), [2, 1, 3]),
        (many("sequence", const("a"), {"type": "token", "token": "<pad>"}), [2, 1]),
        (tag("<pad>a", TEXT, "<pad>"), [1, 2, 4, 4, 1]),
        (triggered(["<pad>"], tag("<pad>a", const("b"), "<pad>")), [4, 1, 2, 3, 1, 5]),
        (triggered(["b<pad>"], tag("b<pad>a", const("b"), "")), [3, 3, 1, 2, 3, 3]),
    ],
)
def test_a_special_tokens_text_is_that_token(tree: Tree, good: list[int]) -> None:
    constraint = Constraint(kind="structural_tag", value=json.dumps({"format": tree}))
    plugin = special()
    walker = plugin.matcher(constraint, plugin.compile(constraint))
    for token in good:
        assert token in allowed(walker)
        assert walker.accept(token)
    assert walker.accept(0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"type": "token", "token": "<nope>"}, "#/format/token: '<nope>' is not a special token of this model"),
        ({"type": "token", "token": 99}, "#/format/token: 99 is not a special token of this model"),
        (triggered(["<pa"], tag("<pad>a", const("b"), "")), "#/format/tags/0/begin: its trigger ends within a special"),
        (regex("a(?=b)"), "#/format/pattern: a lookahead cannot be enforced (character 1)"),
    ],
)
def test_what_llguidance_lacks_is_refused_with_its_place(tree: Tree, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        special().compile(Constraint(kind="structural_tag", value=json.dumps({"format": tree})))
    assert message in refusal.value.message


def test_free_text_holds_no_special_token() -> None:
    constraint = Constraint(kind="structural_tag", value=json.dumps({"format": TEXT}))
    walker = special().matcher(constraint, special().compile(constraint))
    assert 1 not in allowed(walker)


def test_schemas_in_a_tag_are_reported_with_their_place() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    tree = many("sequence", const("a"), tag("<", {"type": "json_schema", "json_schema": schema}, ">"))
    found = grammar("llguidance").unenforced(Constraint(kind="structural_tag", value=json.dumps({"format": tree})))
    assert [tuple(each) for each in found] == [
        ("#/format/elements/1/content/json_schema/uniqueItems", "llguidance ignores uniqueItems")
    ]


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "outlines"])
@pytest.mark.parametrize(
    ("structure", "triggers", "place"),
    [
        ({"begin": "<g>"}, ["<f"], "#/structures/0/begin: must start with one of the triggers"),
        ({}, ["<f", "<g"], "#/triggers: no tag begins with '<g'"),
        ({"schema": {"uniqueItems": True}}, ["<f"], "#/structures/0/schema/uniqueItems"),
        ({"schema": {"properties": {"a": {"type": "strin"}}}}, ["<f"], "#/structures/0/schema/properties/a/type"),
        ({"schema": [1]}, ["<f"], "#/structures/0/schema: must be a JSON schema"),
    ],
)
def test_what_is_wrong_in_the_legacy_form_is_named_as_it_was_written(
    name: str, structure: Tree, triggers: list[str], place: str
) -> None:
    value = {"structures": [{"begin": "<f>", "schema": {}, "end": ">"} | structure], "triggers": triggers}
    constraint = Constraint(kind="structural_tag", value=json.dumps(value))
    try:
        found = [f"{pointer}: {why}" for pointer, why in grammar(name).unenforced(constraint)]
    except RequestError as error:
        found = [error.message.removeprefix("structural_tag: ")]
    assert [one for one in found if one.startswith(place)], found
    assert "#/tags" not in str(found)


@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
def test_a_schema_of_the_legacy_form_that_cannot_be_written_is_named_as_it_was_written(name: str) -> None:
    structure = {"begin": "<f>", "schema": {"items": {"minItems": -1}}, "end": ">"}
    value = json.dumps({"structures": [structure], "triggers": ["<f"]})
    with pytest.raises(RequestError, match="#/structures/0/schema/items/minItems: minItems must not be negative"):
        grammar(name).compile(Constraint(kind="structural_tag", value=value))


@pytest.mark.parametrize("name", ["xgrammar", "outlines", "llguidance"])
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "intger"}}}, "#/properties/a/type: intger is no type"),
        ({"minLength": -1}, "#/minLength: minLength must not be negative"),
        ({"items": {"$ref": "#/$defs/x"}}, "#/items/$ref: '#/$defs/x' is nothing in this schema"),
        ({"anyOf": [{}, 3]}, "#/anyOf/1: is no schema"),
        ({"uniqueItems": True, "required": "a"}, "#/required: required has a value of the wrong type"),
    ],
)
def test_what_is_no_schema_is_an_error_and_not_something_to_allow(
    name: str, schema: dict[str, Any], place: str
) -> None:
    constraint = Constraint(kind="json_schema", value=json.dumps(schema), strict=False)
    with pytest.raises(RequestError) as error:
        grammar(name).unenforced(constraint)
    assert error.value.message.startswith(f"json_schema: {place}")
    assert error.value.hint is None
