"""Continuations as trees: what one pass takes, whatever its budget, and that every token finds its log-probability."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phloem.errors import RequestError
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.request import Request
from phloem.scoring import HEAD_BLOCK_ROWS, MAX_SCORED_TOKENS, Scoring, Tree, book, check, edge_logprobs

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12)


def rows_of(tree: Tree) -> list[list[int]]:
    """Per row of a segment the tokens behind the prompt that it has seen."""
    if tree.draft is None:
        return [[]]
    return [[], *([tree.draft.tokens[above] for above in tree.draft.path(node)] for node in range(len(tree.draft)))]


def spelled(tree: Tree) -> list[tuple[int, ...]]:
    """Per edge the text that it scores the last token of."""
    seen = rows_of(tree)
    return [(*seen[row], token) for row, token in zip(tree.rows, tree.tokens, strict=True)]


@given(TEXTS, st.integers(0, 12), st.booleans())
def test_every_token_is_scored_after_what_precedes_it(texts: list[list[int]], budget: int, branches: bool) -> None:
    scoring = Scoring(texts)
    passes = 0
    while scoring.result is None:
        tree = scoring.tree(budget, branches=branches)
        assert tree.draft is None or tree.draft.problem(4, 100) is None
        assert branches or tree.draft is None or tree.draft.is_chain
        assert tree.nodes <= max(budget, scoring.longest - 1)
        edges = spelled(tree)
        assert len(set(edges)) == len(edges)  # what is shared is scored once
        scoring.take(tree, [float(hash(edge)) for edge in edges])
        passes += 1
        assert tree.last == (scoring.result is not None)
    assert scoring.result == [[float(hash(tuple(t[: i + 1]))) for i in range(len(t))] for t in texts]
    assert passes <= len(texts)
    if branches and budget >= sum(map(len, texts)):
        assert passes == 1


def test_only_inner_nodes_run_and_shared_ones_once() -> None:
    tree = Scoring([[1, 2, 3], [1, 2], [1, 4], [5], [1, 2, 3]]).tree(99, branches=True)
    assert tree.draft is not None
    assert (tree.draft.tokens, tree.draft.parents) == ((1, 2), (-1, 0))
    assert tree.last
    assert Scoring([[i] for i in range(64)]).tree(0, branches=False).draft is None


def test_a_pass_that_came_to_nothing_is_asked_for_again() -> None:
    scoring = Scoring([[1, 2], [3, 4]])
    assert scoring.tree(1, branches=True) == scoring.tree(1, branches=True)
    assert not scoring.tree(1, branches=True).last


def test_logprobs_are_log_softmax_over_blocks_of_rows() -> None:
    texts = [[i % 7, i % 5, i % 11, i % 3, i % 13, 1] for i in range(500)]
    tree = Scoring(texts).tree(10_000, branches=True)
    assert tree.nodes > HEAD_BLOCK_ROWS
    hidden = torch.randn(1 + tree.nodes, 8, generator=torch.Generator().manual_seed(0))
    head = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    got = edge_logprobs(tree, hidden, lambda rows: rows @ head)
    truth = (hidden @ head).log_softmax(-1)
    assert got == pytest.approx([truth[r, t].item() for r, t in zip(tree.rows, tree.tokens, strict=True)], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_the_request(bad: float) -> None:
    call = GenerateCall(call_id="a", prompt=[1], params=SamplingParams(), score=[[2]])
    request = Request(call, 0, seed=0, limit=2, arrival=1)
    request.scoring = Scoring([[2]])
    tree = request.scoring.tree(9, branches=True)
    logprobs = edge_logprobs(tree, torch.zeros(1, 4), lambda rows: torch.tensor([[0.0, bad, 0.0]]))
    book(request, tree, logprobs)
    assert request.finish_reason == "error"
    assert "NaN" in str(request.error)
    assert request.scoring.result is None


def test_a_token_that_the_model_rules_out_scores_minus_infinity() -> None:
    tree = Scoring([[2]]).tree(9, branches=True)
    assert edge_logprobs(tree, torch.zeros(1, 4), lambda rows: torch.tensor([[0.0, 0.0, -math.inf]])) == [-math.inf]


@pytest.mark.parametrize(
    ("score", "params", "param", "words"),
    [
        ([], {}, "score", "no continuation"),
        ([[1], []], {}, "score", "no token"),
        ([[99]], {}, "score", "outside the vocabulary of 50"),
        ([[1] * 9], {}, "score", "does not fit one step of 8"),
        ([[1] * 8] * (MAX_SCORED_TOKENS // 8 + 1), {}, "score", "at most"),
        ([[1]], {"temperature": 0.0}, "temperature", "nothing is generated"),
        ([[1]], {"n": 2}, "n", "nothing is generated"),
        ([[1]], {"stop": ["a"]}, "stop", "nothing is generated"),
        ([[1]], {"regex": "a"}, "regex", "nothing is generated"),
        ([[1]], {"max_tokens": 4}, "max_tokens", "nothing is generated"),
        ([[1]], {"prompt_logprobs": 0}, "prompt_logprobs", "nothing is generated"),
    ],
)
def test_refusals(score: list[list[int]], params: dict[str, object], param: str, words: str) -> None:
    call = GenerateCall(call_id="a", prompt=[1], params=SamplingParams(**params), score=score)
    with pytest.raises(RequestError, match=words) as error:
        check(call, 50, 8)
    assert error.value.param == param
