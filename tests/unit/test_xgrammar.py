"""xgrammar beside JSON Schema and Python's regular expressions: what it lets pass is reported."""

from __future__ import annotations

import json
import re

import grammar_corpus
import grammar_rig
import pytest

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import Matcher, PluginContext
from phloem.plugins.grammar._ebnf_regex import found_in_json, matching
from phloem.plugins.grammar.xgrammar import XGrammar
from phloem.testing.grammar import toy_tokenizer
from phloem.testing.plugin import TOY_SPEC

CASES = {
    case.name: case
    for group in vars(grammar_corpus).values()
    if isinstance(group, tuple)
    for case in group
    if isinstance(case, grammar_corpus.Case)
}


def backend() -> XGrammar:
    return XGrammar(XGrammar.Options(), PluginContext("grammar", "xgrammar", model=TOY_SPEC, tokenizer=toy_tokenizer()))


@pytest.fixture(scope="module")
def xgrammar() -> XGrammar:
    return backend()


def takes(matcher: Matcher, text: bytes) -> bool:
    """Whether a text is whole under the grammar: by the library's own bytes, so that no vocabulary is in the way."""
    inner = matcher.fork()._matcher  # type: ignore[attr-defined]
    return bool(inner.accept_string(text) and inner.is_completed())


@pytest.mark.parametrize("name", sorted(CASES))
def test_schemas_of_the_corpus_are_exact_or_reported(xgrammar: XGrammar, name: str) -> None:
    case = CASES[name]
    constraint = Constraint(kind="json_schema", value=json.dumps(case.schema, ensure_ascii=False))
    if xgrammar.unenforced(constraint):
        xgrammar.compile(Constraint(kind="json_schema", value=constraint.value, strict=False))
        return
    matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
    assert [one for one in case.invalid if takes(matcher, grammar_corpus.text_of(one))] == []
    lost = [one for one in case.valid if not takes(matcher, grammar_corpus.text_of(one))]
    assert lost == (['"\\', "\n\t"] if case.name == "lengths of escapes" else [])  # counted ones are not escaped


def test_reports_name_the_place(xgrammar: XGrammar) -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    (found,) = xgrammar.unenforced(Constraint(kind="json_schema", value=json.dumps(schema)))
    assert found == ("#/properties/ids/uniqueItems", "xgrammar ignores uniqueItems")


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "outlines"])
@pytest.mark.parametrize("kind", [5, {"a": 1}, None, [5], "strin", [], ["string", "nul"], [["string"]], [{}]])
def test_a_type_that_is_none_is_refused(name: str, kind: object) -> None:
    schema = {"type": "array", "items": {"type": kind}}
    with pytest.raises(RequestError, match=r"^json_schema: #/items/type: "):
        grammar_rig.backend(name).unenforced(Constraint(kind="json_schema", value=json.dumps(schema)))


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "outlines"])
def test_lists_of_items_are_walked(name: str) -> None:
    schema = {"$schema": grammar_corpus.DRAFT7, "items": [{"type": "null"}, {"uniqueItems": True}]}
    value = json.dumps({"type": "object", "properties": {"a": schema | {"type": "array"}}})
    (found,) = grammar_rig.backend(name).unenforced(Constraint(kind="json_schema", value=value))
    assert found.pointer == "#/properties/a/items/1/uniqueItems"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a+b?", ["aab", "b"]),
        ("^ab$", ["ab", "xabx"]),
        ("(a|b)*c", ["ababc", "d"]),
        (r"\d{3}-\w+", ["123-a_", "12-a"]),
        ("[^a]", ["b", "a", "é"]),
        (".", ["a", "\n", "é"]),
        ("a{,2}", ["", "aa", "aaa"]),
        ("(?i)ab", ["AB", "x"]),
        (r"[\w-]+@", ["a-b@", "@"]),
        (r"\D", ["a", "1", "٣"]),
        (r"\S", ["a", " ", "\u3000"]),
        ("(?s:.)", ["\n"]),
        ("[à-ü]", ["é", "a"]),
        ("a|", ["a", "", "b"]),
    ],
)
def test_regexes_mean_what_python_means(xgrammar: XGrammar, pattern: str, texts: list[str]) -> None:
    constraint = Constraint(kind="regex", value=pattern)
    matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
    for text in texts:
        assert takes(matcher, text.encode()) == (re.fullmatch(pattern, text) is not None), text


def test_classes_of_unicode_are_narrowed_never_widened() -> None:
    assert matching(r"\d", "regex") == "([0-9])"
    assert "a-z" not in found_in_json(r"^\W$", "json_schema")
    assert matching(r"[^\W]", "regex") == matching(r"[\w]", "regex") == "([0-9A-Z_a-z])"


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "a(?=b)", "a lookahead cannot be enforced"),
        ("regex", "a{5000}", "more than 1000 repetitions are refused"),
        ("regex", "(", "not a regular expression"),
        ("json_schema", '{"type": "array", "maxItems": 1000000000}', "maxItems 1000000000 exceeds 10000"),
        ("json_schema", '{"enum": []}', "no text satisfies this json_schema"),
        ("json_schema", '{"items":' * 300 + "true" + "}" * 300, "nested deeper than 100"),
        ("ebnf", "root ::= nothing", "is not defined"),
    ],
)
def test_refusals(xgrammar: XGrammar, kind: str, value: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        xgrammar.compile(Constraint(kind=kind, value=value))
    assert error.value.param == kind


BLANKS = ['{"x":1}', '{ "x": 1}', '{"x":  1}', '{"x": 1 }', '{"x": 1}\n', '{\n"x": 1}']


@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_json_within_tags_has_the_whitespace_of_the_setting(xgrammar: XGrammar, whitespace: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for content, close in (
        ({"type": "tag", "begin": "[", "content": {"type": "json_schema", "json_schema": schema}, "end": "]"}, "]"),
        ({"type": "json_schema", "json_schema": schema}, ""),
    ):
        value = json.dumps({"format": content})
        constraint = Constraint(kind="structural_tag", value=value, whitespace=whitespace)
        matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
        opened = "[" if close else ""
        assert takes(matcher, f'{opened}{{"x": 1}}{close}'.encode())
        for text in BLANKS:
            inside = whitespace == "flexible" and not text.endswith("\n")
            assert takes(matcher, f"{opened}{text}{close}".encode()) == inside, text
        assert not takes(matcher, f'{opened}{{{" " * 9}"x": 1}}{close}'.encode())


def test_patterns_within_tags_mean_what_python_means(xgrammar: XGrammar) -> None:
    value = json.dumps({"format": {"type": "regex", "pattern": r"(ab+)?\d"}})
    constraint = Constraint(kind="structural_tag", value=value)
    matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
    assert takes(matcher, b"abb1")
    assert not takes(matcher, b"a1")
    assert not takes(matcher, b"bb1")
    wrong = Constraint(kind="structural_tag", value=value.replace("ab+", "?=b"))
    with pytest.raises(RequestError, match="#/format/pattern: a lookahead cannot be enforced"):
        xgrammar.compile(wrong)


def test_choices_may_have_any_character(xgrammar: XGrammar) -> None:
    constraint = Constraint(kind="choices", value=json.dumps(["😀", 'a"\\\n', ""]))
    matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
    assert all(takes(matcher, text.encode()) for text in ("😀", 'a"\\\n', ""))
    assert not takes(matcher, b"a")


def test_recursion_without_an_end_is_refused(xgrammar: XGrammar) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    for required in ([], ["next"]):
        schema = {"$ref": "#/$defs/node", "$defs": {"node": node | {"required": required}}}
        constraint = Constraint(kind="json_schema", value=json.dumps(schema))
        if required:
            with pytest.raises(RequestError, match="no text satisfies this json_schema"):
                xgrammar.compile(constraint)
        else:
            assert takes(xgrammar.matcher(constraint, xgrammar.compile(constraint)), b'{"next": {"next": {}}}')


def test_a_hundred_references_are_written_once_each(xgrammar: XGrammar) -> None:
    """Written out they would double at each of them."""
    names = [f"d{i}" for i in range(40)]
    pair = {
        name: {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "xy"}}
        for i, name in enumerate(names)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": pair | {"d40": {"const": 1}}}
    constraint = Constraint(kind="json_schema", value=json.dumps(schema))
    assert len(xgrammar.compile(constraint)) < 4_000_000
