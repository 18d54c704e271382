"""The toy grammar keeps the contract of kind `grammar`."""

from __future__ import annotations

import pytest

from phloem.constraint import Constraint
from phloem.errors import RequestError
from phloem.testing.grammar import GrammarSuite, allowed, as_constraint
from phloem.testing.toy_grammar import ToyGrammar, ToyMatcher


class TestToyGrammar(GrammarSuite):
    plugin = ToyGrammar
    refused = ({"regex": "("}, {"json_schema": {"type": "object"}}, {"ebnf": "root ::= 'a'"})


class BrokenMatcher(ToyMatcher):
    """Rolls back one token too few."""

    def rollback(self, tokens: int) -> None:
        super().rollback(max(0, tokens - 1))


class BrokenGrammar(ToyGrammar):
    def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
        good = super().matcher(constraint, compiled)
        bad = BrokenMatcher("x", [], ())
        bad.__dict__.update(good.__dict__)
        return bad


def test_the_suite_can_fail() -> None:
    class Suite(GrammarSuite):
        plugin = BrokenGrammar

    with pytest.raises(AssertionError):
        Suite().test_rollback_restores_every_state()


def test_an_end_token_ends_and_can_be_taken_back() -> None:
    matcher = ToyMatcher("ab?", ["", "a", "b"], [0])
    assert not matcher.accept(0)
    assert matcher.accept(1)
    assert allowed(matcher)[:3] == [0, 2]
    assert matcher.accept(0)
    assert matcher.is_complete()
    assert not matcher.accept(2)
    matcher.rollback(1)
    assert matcher.accept(2)
    assert matcher.is_complete()
    with pytest.raises(ValueError, match="cannot take back 3 of 2 tokens"):
        matcher.rollback(3)


def test_toy_grammar_names_what_it_cannot_do() -> None:
    grammar = TestToyGrammar().make()
    with pytest.raises(RequestError, match="json_schema cannot be enforced by the toy grammar"):
        grammar.compile(as_constraint({"json_schema": True}))
    with pytest.raises(RequestError, match="regex is not valid"):
        grammar.compile(as_constraint({"regex": "["}))
