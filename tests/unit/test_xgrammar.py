"""xgrammar beside JSON Schema and Python's regular expressions: what it lets pass is reported."""

from __future__ import annotations

import json
import re

import grammar_corpus
import pytest

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.interfaces import Matcher, PluginContext
from phloem.plugins.grammar._plain_regex import plain
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
def test_what_is_invalid_is_refused_or_reported(xgrammar: XGrammar, name: str) -> None:
    case = CASES[name]
    constraint = Constraint(kind="json_schema", value=json.dumps(case.schema, ensure_ascii=False))
    reported = xgrammar.unenforced(constraint)
    try:
        matcher = xgrammar.matcher(constraint, xgrammar.compile(constraint))
    except RequestError:
        return
    if not reported:
        assert not [one for one in case.invalid if takes(matcher, grammar_corpus.text_of(one))]


def test_reports_name_the_place(xgrammar: XGrammar) -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    (found,) = xgrammar.unenforced(Constraint(kind="json_schema", value=json.dumps(schema)))
    assert found == ("#/properties/ids/uniqueItems", "xgrammar ignores uniqueItems")


@pytest.mark.parametrize("kind", [5, {"a": 1}, None])
def test_a_type_that_is_none_is_reported(xgrammar: XGrammar, kind: object) -> None:
    (found,) = xgrammar.unenforced(Constraint(kind="json_schema", value=json.dumps({"type": kind})))
    assert found.pointer == "#/type"


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
    assert plain(r"\d", "regex") == "[0-9]"
    assert '"' not in plain(".", "json_schema", in_json=True)
    assert "\\u005c" not in plain(".", "json_schema", in_json=True)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "a(?=b)", "a lookahead cannot be enforced"),
        ("regex", "a{5000}", "more than 1000 repetitions are refused"),
        ("regex", "(", "not a regular expression"),
        ("json_schema", '{"type": "array", "maxItems": 1000000000}', "maxItems 1000000000 exceeds 10000"),
        ("json_schema", '{"enum": []}', "enum array must not be empty"),
        ("json_schema", '{"items":' * 300 + "true" + "}" * 300, "nested deeper than 200"),
        ("ebnf", "root ::= nothing", "is not defined"),
    ],
)
def test_refusals(xgrammar: XGrammar, kind: str, value: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        xgrammar.compile(Constraint(kind=kind, value=value))
    assert error.value.param == kind
