"""The toy grammar keeps the contract of kind `grammar`."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError
from phloem.testing.grammar import GrammarSuite, allowed, as_constraint
from phloem.testing.toy_grammar import ToyGrammar, ToyMatcher


class TestToyGrammar(GrammarSuite):
    plugin = ToyGrammar
    refused = ({"regex": "("}, {"json_schema": {"type": "object"}}, {"ebnf": "root ::= 'a'"})


class RollsBackTooLittle(ToyMatcher):
    def rollback(self, tokens: int) -> None:
        super().rollback(max(0, tokens - 1))


class Promises(ToyMatcher):
    def forced(self) -> bytes:
        return super().forced() or b"a"


class Moves(ToyMatcher):
    def forced(self) -> bytes:
        self.accept(2)
        return b""


class SharesItsState(ToyMatcher):
    def fork(self) -> ToyMatcher:
        twin = super().fork()
        twin._states = self._states
        return twin


class GoesOn(ToyMatcher):
    def _allows(self, token: int) -> bool:
        return super()._allows(token) or token == 5

    def accept(self, token: int) -> bool:
        self._ended[-1] = False
        return super().accept(token)


class EndsEarly(ToyMatcher):
    def _matches(self) -> bool:
        return True


class TakesEverything(ToyMatcher):
    def accept(self, token: int) -> bool:
        return super().accept(token) or not self._push(self._states[-1], False)


class Remembers(ToyGrammar):
    """Needs what its own `compile` left behind."""

    def compile(self, constraint: Constraint) -> bytes:
        self._last = super().compile(constraint)
        return b""

    def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
        return super().matcher(constraint, getattr(self, "_last", b"x"))


class PointsNowhere(ToyGrammar):
    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        return [Unenforced("here", "")]


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (RollsBackTooLittle, "rollback_restores_every_state"),
        (RollsBackTooLittle, "an_end_can_be_taken_back"),
        (GoesOn, "an_end_can_be_taken_back"),
        (EndsEarly, "walks_end_in_a_match"),
        (Promises, "forced_bytes_begin_every_continuation"),
        (Moves, "forced_bytes_begin_every_continuation"),
        (SharesItsState, "forks_are_independent"),
        (SharesItsState, "a_kept_copy_serves_many"),
        (TakesEverything, "masks_equal_what_is_accepted"),
        (TakesEverything, "a_refused_token_changes_nothing"),
        (Remembers, "what_one_instance_compiled_another_unpacks"),
        (PointsNowhere, "the_report_points_into_the_constraint"),
    ],
)
def test_the_suite_finds(broken: type[Any], test: str) -> None:
    class Broken(ToyGrammar):
        def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
            made = super().matcher(constraint, compiled)
            made.__class__ = broken
            return made

    class Suite(GrammarSuite):
        plugin = Broken if issubclass(broken, ToyMatcher) else broken

    with pytest.raises(AssertionError):
        getattr(Suite(), f"test_{test}")()


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
