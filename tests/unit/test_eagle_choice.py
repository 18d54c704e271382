"""What a head finds likely, under a grammar, a bias, a temperature, and without what ends the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from drafting_rig import END, Vocabulary

from phloem.interfaces import DraftContext, Matcher
from phloem.params import SamplingParams
from phloem.plugins.spec._eagle_choice import Choice
from phloem.request import Namespace

WORDS = Vocabulary("a", "b", "c", "d")  # 1 to 4; 0 ends a text
TOKENS = torch.tensor([3, 0, 1, 4])  # what the head can propose: not b
LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5])


def chances(
    path: Sequence[int] = (), matcher: Matcher | None = None, **params: object
) -> tuple[list[float], DraftContext]:
    context = DraftContext("a", array("i", [1]), 1, Namespace(), matcher, SamplingParams(**params))  # type: ignore[arg-type]
    [row] = Choice(TOKENS, WORDS.spec).chances([context], [path], LOGITS[None].clone())
    return row.tolist(), context


def test_ends_have_no_chance_and_leave_the_others_as_they_are() -> None:
    whole = LOGITS.softmax(0).tolist()
    assert chances(ignore_eos=True)[0] == pytest.approx(whole)
    assert chances()[0] == pytest.approx([whole[0], 0.0, *whole[2:]])
    assert chances(ignore_eos=True, stop_token_ids=[4, 2])[0] == pytest.approx([*whole[:3], 0.0])


def test_bias_and_temperature() -> None:
    warm = ((LOGITS + torch.tensor([5.0, 0, 0, 0])) / 2).softmax(0).tolist()
    biased = {"ignore_eos": True, "logit_bias": {3: 5.0, 2: 9.0}}  # one that it cannot propose changes nothing
    assert chances(temperature=2.0, **biased)[0] == pytest.approx(warm)
    cold = (LOGITS + torch.tensor([5.0, 0, 0, 0])).softmax(0).tolist()
    assert chances(temperature=0.0, **biased)[0] == pytest.approx(cold)


@pytest.mark.parametrize(
    ("path", "allowed"), [((), ["a"]), ((1,), ["c", "d"]), ((1, 3), ["c", "d"]), ((3,), []), ((1, 1), [])]
)
def test_only_what_the_grammar_takes_behind_a_path(path: Sequence[int], allowed: list[str]) -> None:
    """And the matcher stands where it stood."""
    matcher = WORDS.matcher("a[cd]*b")
    row, context = chances(path, matcher)
    kept = [WORDS.pieces[token] for token, chance in zip(TOKENS.tolist(), row, strict=True) if chance > 0]
    assert sorted(kept) == allowed
    assert sum(row) == pytest.approx(1.0 if allowed else 0.0)
    assert context.matcher is matcher
    assert matcher.accept(1)
    matcher.rollback(1)
    assert not matcher.accept(3)


def test_best_and_whole() -> None:
    choice = Choice(TOKENS, WORDS.spec)
    row = torch.tensor([0.2, 0.0, 0.5, 0.3])
    assert choice.best(row[None], 2) == [([1, 4], pytest.approx([0.5, 0.3]))]
    assert len(choice.best(row[None], 9)[0][0]) == 4
    assert choice.whole(row).tolist() == pytest.approx([0.0, 0.5, 0.0, 0.2, 0.3])
    assert END == 0
