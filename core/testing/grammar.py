"""Conformance of kind `grammar`: masks equal what is accepted, state can be taken back and copied, ends are right.

class TestMine(GrammarSuite):
    plugin = MyGrammar
    constraints = ({"regex": "[ab]+c"}, {"json_schema": True})
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from ..constraint import Constraint, constraint_of
from ..errors import RequestError
from ..interfaces import Grammar, Matcher, PluginContext, TokenizerData
from ..params import SamplingParams
from ..tokenizer import Tokenizer
from .plugin import TOY_SPEC, PluginSuite

_PIECES = (*"abcdefgh0123", "ab", "abc", "bc", "ca", '"', "{", "}", ":", ",", "[", "]", " ", "true", "null", "é", "世")


def toy_tokenizer() -> Tokenizer:
    """32 tokens: `<end>` (0), `<pad>` (1), letters, digits, JSON's punctuation and a few longer pieces."""
    pieces = ["<end>", "<pad>", *_PIECES][: TOY_SPEC.vocab_size]
    special = [
        {"id": i, "content": pieces[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i in range(2)
    ]
    model = {"type": "Unigram", "unk_id": 1, "vocab": [[piece, -float(len(pieces))] for piece in pieces]}
    data = {"version": "1.0", "added_tokens": special, "decoder": {"type": "Fuse"}, "model": model}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(TokenizerData(json.dumps(data | empty), special_tokens={"eos_token": "<end>"}))


class GrammarSuite(PluginSuite):
    """Set `constraints` to what the backend can do, `refused` to what it cannot: each a SamplingParams keyword."""

    kind = "grammar"
    constraints: ClassVar[tuple[dict[str, Any], ...]] = (
        {"regex": "[ab]+c"},
        {"regex": "(ab|cd){2}é?"},
        {"choices": ["abc", "abca", "d"]},
    )
    refused: ClassVar[tuple[dict[str, Any], ...]] = ({"regex": "("},)

    def make(self) -> Any:
        """A fresh backend over the toy tokenizer."""
        context = PluginContext(self.kind, "under test", model=TOY_SPEC, tokenizer=toy_tokenizer())
        return self.plugin(self.plugin.Options(**self.options), context)

    def matchers(self) -> Iterator[tuple[dict[str, Any], Matcher]]:
        """A matcher at its start for every constraint."""
        grammar: Grammar = self.make()
        for given in self.constraints:
            constraint = as_constraint(given)
            yield given, grammar.matcher(constraint, grammar.compile(constraint))

    def test_masks_equal_what_is_accepted(self) -> None:
        """On random walks, bit t is set exactly where a copy of the state accepts t."""
        rng = random.Random(0)
        for constraint, matcher in self.matchers():
            for _ in range(20):
                mask = allowed(matcher)
                accepted = [t for t in range(TOY_SPEC.vocab_size) if matcher.fork().accept(t)]
                assert mask == accepted, constraint
                inner = [t for t in mask if t not in TOY_SPEC.eos_token_ids]
                if not inner:
                    break
                assert matcher.accept(rng.choice(inner))

    def test_a_refused_token_changes_nothing(self) -> None:
        """`accept` returns False and the mask stays."""
        for constraint, matcher in self.matchers():
            before = allowed(matcher)
            for token in set(range(TOY_SPEC.vocab_size)) - set(before):
                assert not matcher.accept(token), constraint
            assert allowed(matcher) == before

    def test_rollback_restores_every_state(self) -> None:
        """Down a random path and back, at once and step by step."""
        rng = random.Random(1)
        for _, matcher in self.matchers():
            masks = [allowed(matcher)]
            while len(masks) < 6 and masks[-1] and not matcher.is_complete():
                assert matcher.accept(rng.choice(masks[-1]))
                masks.append(allowed(matcher))
            for expected in masks[-2:0:-1]:
                matcher.rollback(1)
                assert allowed(matcher) == expected
            matcher.rollback(min(1, len(masks) - 1))
            assert allowed(matcher) == masks[0]

    def test_forks_are_independent(self) -> None:
        """Advancing a copy, or what it was copied from, leaves the other."""
        for _, matcher in self.matchers():
            start = allowed(matcher)
            twin = matcher.fork()
            assert twin.accept(start[0])
            assert allowed(matcher) == start
            after = allowed(twin)
            assert matcher.accept(start[-1])
            assert allowed(twin) == after

    def test_a_kept_copy_serves_many(self) -> None:
        """Forks of a matcher that stays at its start all begin there, whatever the ones before did."""
        for constraint, matcher in self.matchers():
            start = allowed(matcher)
            for token in start:
                walker = matcher.fork()
                assert allowed(walker) == start, constraint
                assert walker.accept(token)
            assert allowed(matcher) == start

    def test_an_end_can_be_taken_back(self) -> None:
        """After an end token the output is complete and nothing else may follow; `rollback` undoes that too."""
        rng, ends = random.Random(3), set(TOY_SPEC.eos_token_ids)
        for constraint, matcher in self.matchers():
            masks = [allowed(matcher)]
            while not ends & set(masks[-1]) and len(masks) < 200:
                assert matcher.accept(rng.choice(masks[-1]))
                masks.append(allowed(matcher))
            if len(masks) == 200:
                continue  # a walk that would not end
            assert matcher.accept(min(ends)), constraint
            assert matcher.is_complete()
            assert set(allowed(matcher)) <= ends
            assert not any(matcher.accept(token) for token in range(TOY_SPEC.vocab_size) if token not in ends)
            matcher.rollback(1)
            assert allowed(matcher) == masks[-1], constraint
            assert matcher.accept(min(ends))
            matcher.rollback(len(masks))
            assert allowed(matcher) == masks[0], constraint

    def test_forced_bytes_begin_every_continuation(self) -> None:
        """On random walks no allowed token contradicts them, none ends the output before them, and asking is free."""
        rng, tokenizer = random.Random(4), toy_tokenizer()
        for constraint, start in self.matchers():
            for _ in range(5):
                matcher, due = start.fork(), b""
                for _ in range(20):
                    mask, forced = allowed(matcher), matcher.forced()
                    assert allowed(matcher) == mask, "asking changed the state"
                    assert forced.startswith(due) or due.startswith(forced), constraint
                    due = max(due, forced, key=len)
                    for token in mask:
                        text = b"" if token in TOY_SPEC.eos_token_ids else tokenizer.token_bytes(token)
                        assert text or not due, f"{constraint}: {due!r} is due, and the output may end"
                        assert due[: len(text)] == text[: len(due)], f"{constraint}: {due!r} is due, not {text!r}"
                    inner = [token for token in mask if token not in TOY_SPEC.eos_token_ids]
                    if not inner:
                        break
                    token = rng.choice(inner)
                    assert matcher.accept(token)
                    due = due[len(tokenizer.token_bytes(token)) :]

    def test_what_one_instance_compiled_another_unpacks(self) -> None:
        """They live in different processes: nothing but the bytes passes from one to the other."""
        rng, there, here = random.Random(5), self.make(), self.make()
        for given in self.constraints:
            constraint = as_constraint(given)
            compiled = there.compile(constraint)
            assert isinstance(compiled, bytes)
            pair = there.matcher(constraint, compiled), here.matcher(constraint, compiled)
            for _ in range(10):
                mask = allowed(pair[0])
                assert allowed(pair[1]) == mask, given
                if not mask:
                    break
                token = rng.choice(mask)
                assert pair[0].accept(token)
                assert pair[1].accept(token)

    def test_the_report_points_into_the_constraint(self) -> None:
        """What will not be enforced is told by JSON pointer and reason."""
        grammar: Grammar = self.make()
        for given in self.constraints:
            for pointer, why in grammar.unenforced(as_constraint(given)):
                assert pointer.startswith("#"), given
                assert why

    def test_walks_end_in_a_match(self) -> None:
        """Texts written under the mask satisfy the constraint when the end token comes."""
        rng, tokenizer = random.Random(2), toy_tokenizer()
        for constraint, matcher in self.matchers():
            for _ in range(5):
                walker, ids = matcher.fork(), list[int]()
                while (token := rng.choice(allowed(walker))) not in TOY_SPEC.eos_token_ids and len(ids) < 200:
                    assert walker.accept(token)
                    ids.append(token)
                    if walker.is_complete():
                        assert set(allowed(walker)) <= set(TOY_SPEC.eos_token_ids)
                        break
                if len(ids) < 200:
                    assert satisfies(constraint, tokenizer.decode(ids)), (constraint, ids)

    def test_what_cannot_be_enforced_is_refused(self) -> None:
        """With a RequestError that names the parameter."""
        for constraint in self.refused:
            with pytest.raises(RequestError) as refusal:
                self.make().compile(as_constraint(constraint))
            assert refusal.value.param in constraint


def as_constraint(given: dict[str, Any], whitespace: str = "compact") -> Constraint:
    """A constraint from the parameters that a request would give."""
    constraint = constraint_of(SamplingParams(**given), whitespace)
    assert constraint is not None, f"{given} is no constraint"
    return constraint


def allowed(matcher: Matcher) -> list[int]:
    """Token ids that a mask allows; the row is full of rubbish before, which `fill` must overwrite."""
    row: npt.NDArray[np.int32] = np.full((TOY_SPEC.vocab_size + 31) // 32, 0x5A5A5A5A, dtype=np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: TOY_SPEC.vocab_size]
    return [int(token) for token in np.flatnonzero(bits)]


def satisfies(constraint: dict[str, Any], text: str) -> bool:
    """Judged by the standard library."""
    if "choices" in constraint:
        return text in constraint["choices"]
    if "regex" in constraint:
        return re.fullmatch(constraint["regex"], text) is not None
    return json.loads(text) is not None or text.strip() == "null"
