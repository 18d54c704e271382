"""The filter pipeline against a slow reference: every parameter, every order, ties at every cut."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rig import VOCAB, make_request, reference_cut, reference_probabilities, reference_scores, segment_of

from phloem import cutoffs, filters
from phloem.drafts import Draft
from phloem.filters import Span
from phloem.params import SamplingParams
from phloem.request import Request

torch.set_num_threads(1)


def probabilities(scores: torch.Tensor, params: SamplingParams) -> list[list[float]]:
    """What `cut` leaves of scores [R, vocab], as distributions over all tokens."""
    out = torch.zeros(scores.shape, dtype=torch.float64)
    for kept in cutoffs.cut(scores, [params] * len(scores)):
        for row, values, ids in zip(kept.rows.tolist(), kept.scores, kept.ids, strict=True):
            alive = values != -math.inf
            assert alive.any()
            out[row, ids[alive]] = torch.softmax(values[alive].double(), -1)
    return out.tolist()


def edited(logits: list[float], request: Request, draft: Draft | None = None) -> torch.Tensor:
    segment = segment_of(request, draft)
    depths = draft.depths() if draft else []
    positions = [request.output_len, *(request.output_len + d for d in depths)]
    span = Span(segment, 0, positions, list(range(len(positions))), at=0)
    scores = torch.tensor([logits] * span.count)
    filters.edit(scores, [span], {})
    assert span.error is None
    return scores


penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.5, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 0.75]),
        "min_tokens": st.sampled_from([0, 3, 6]),
        "stop_token_ids": st.sampled_from([[], [3], [3, 5]]),
        "ignore_eos": st.booleans(),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 7), st.floats(-100, 100), max_size=3),
    }
)
tokens = st.lists(st.integers(0, 7), min_size=1, max_size=6)
logit = st.floats(-8, 8, width=32)


@settings(max_examples=150, deadline=None)
@given(penalties, tokens, tokens, st.lists(logit, min_size=8, max_size=8), st.lists(st.integers(0, 7), max_size=3))
def test_edits_match_the_reference(
    arguments: dict[str, Any], prompt: list[int], output: list[int], logits: list[float], chain: list[int]
) -> None:
    request = make_request(SamplingParams(**arguments), prompt)
    request.tokens.extend(output)
    scores = edited(logits, request, Draft.chain(chain))
    for i in range(len(chain) + 1):
        expected = reference_scores(logits, request, chain[:i])
        assert scores[i].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)


@settings(max_examples=150, deadline=None)
@given(
    penalties,
    tokens,
    tokens,
    st.lists(logit, min_size=8, max_size=8),
    st.lists(st.integers(0, 7), max_size=3),
    st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=4, max_size=4),
)
def test_edits_of_few_columns_are_those_of_all(
    arguments: dict[str, Any],
    prompt: list[int],
    output: list[int],
    logits: list[float],
    chain: list[int],
    sets: list[set[int]],
) -> None:
    """Rows that hold some tokens' scores only, padded behind, are edited as those tokens' columns of whole rows are."""
    request = make_request(SamplingParams(**arguments), prompt)
    request.tokens.extend(output)
    draft = Draft.chain(chain)
    whole = edited(logits, request, draft)
    rows = len(chain) + 1
    width = max(map(len, sets[:rows]))
    ids = np.array([sorted(own) + [VOCAB - 1] * (width - len(own)) for own in sets[:rows]])
    scores = torch.full(ids.shape, -math.inf)
    for row, own in enumerate(sets[:rows]):
        scores[row, : len(own)] = torch.tensor(logits)[sorted(own)]
    positions = [request.output_len, *(request.output_len + d for d in draft.depths())]
    filters.edit(scores, [Span(segment_of(request, draft), 0, positions, list(range(rows)), at=0)], {}, ids)
    for row, own in enumerate(sets[:rows]):
        assert scores[row, : len(own)].tolist() == whole[row, sorted(own)].tolist()
        assert scores[row, len(own) :].eq(-math.inf).all()


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 32, 33, 100, 517])
def test_masks_of_many_rows_in_one_pass(vocab: int) -> None:
    """Any rows in any order, by their own bitmasks; bits behind the vocabulary mean nothing; the logits stay."""
    rng = np.random.default_rng(vocab)
    width = (vocab + 31) // 32 * 32
    allowed = rng.random((6, width)) < 0.5
    packed = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(9, vocab)
    before = logits.clone()
    for rows in ([0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [8, 0, 3, 3, 1, 7], [4]):
        bits = torch.from_numpy(packed[: len(rows)])
        scores = filters.masked(logits, rows, bits)
        expected = logits[rows].masked_fill(~torch.from_numpy(allowed[: len(rows), :vocab]), -math.inf)
        assert torch.equal(scores, expected)
    assert torch.equal(logits, before)


def test_rows_side_by_side_are_not_copied() -> None:
    table = torch.arange(12.0).view(6, 2)
    for rows in ([0, 1, 2], [4], [5, 4], [0, 2], []):
        assert torch.equal(filters.picked(table, rows), table[rows])
    assert filters.picked(table, [2, 3]).data_ptr() == table[2].data_ptr()


def test_repetition_looks_at_prompt_and_output_but_frequency_and_presence_at_the_output_only() -> None:
    request = make_request(SamplingParams(repetition_penalty=2.0), [1])
    request.tokens.extend([2, 2])
    assert edited([1.0] * 4, request)[0].tolist() == [1.0, 0.5, 0.5, 1.0]
    request = make_request(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), [1])
    request.tokens.extend([2, 2])
    assert edited([1.0] * 4, request)[0].tolist() == [1.0, 1.0, 1.0 - 2 * 0.5 - 0.25, 1.0]


def test_a_masked_end_token_stays_masked_whatever_its_bias() -> None:
    request = make_request(SamplingParams(min_tokens=1, logit_bias={0: 100.0}))
    assert edited([0.0] * 4, request)[0].tolist() == [-math.inf, 0.0, 0.0, 0.0]


def test_ends_outside_the_vocabulary_mean_nothing() -> None:
    """A stop token id may be any number."""
    scores = edited([0.0] * 4, make_request(SamplingParams(min_tokens=2, stop_token_ids=[4, 10**6])))
    assert scores.tolist() == [[-math.inf, 0.0, 0.0, 0.0]]


def test_min_tokens_ends_in_the_middle_of_a_draft() -> None:
    scores = edited([0.0] * 4, make_request(SamplingParams(min_tokens=2)), Draft.chain([1, 2, 3]))
    assert [row[0] == -math.inf for row in scores.tolist()] == [True, True, False, False]


CUTS = [
    {"top_k": k, "top_p": p, "min_p": m, "temperature": t}
    for k, p, m, t in itertools.product((0, 1, 3, 8, 100), (1.0, 0.9, 0.55, 1e-6), (0.0, 0.1, 1.0), (0.3, 1.0, 2.5))
]


@pytest.mark.parametrize("vocab", [VOCAB, 400])
def test_cuts_match_the_reference(vocab: int) -> None:
    """All combinations over an eight-token vocabulary, and over one that needs more than the first candidates."""
    rng = random.Random(vocab)
    for arguments in CUTS:
        params = SamplingParams(**arguments)
        rows = [[rng.gauss(0, 0.3 if i else 2.0) for _ in range(vocab)] for i in range(3)]
        scores = torch.tensor(rows) / params.temperature
        for got, row in zip(probabilities(scores, params), rows, strict=True):
            assert got == pytest.approx(reference_cut(row, params), abs=1e-5), arguments


@pytest.mark.parametrize("arguments", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.3}])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ties_at_cuts_go_to_lower_ids(arguments: dict[str, Any], levels: int) -> None:
    """what-breaks 41: every assignment of few score levels to eight tokens: the kept set is the reference's."""
    params = SamplingParams(**arguments)
    rows = [list(row) for row in itertools.product([0.0, 0.75, 1.5][:levels], repeat=VOCAB)][:: 1 if levels < 3 else 7]
    for got, row in zip(probabilities(torch.tensor(rows), params), rows, strict=True):
        assert got == pytest.approx(reference_cut(row, params), abs=1e-6), row


@pytest.mark.parametrize("arguments", [{"top_k": 10}, {"top_k": 300}, {"top_p": 0.4}, {"min_p": 0.5}])
def test_ties_beyond_the_candidates(arguments: dict[str, Any]) -> None:
    """A vocabulary of equal scores: the lowest ids are kept, though no selection could tell them apart."""
    params = SamplingParams(**arguments)
    (got,) = probabilities(torch.zeros(1, 3000), params)
    count = {"top_k": params.top_k, "top_p": 1200, "min_p": 3000}[next(iter(arguments))]
    assert [p > 0 for p in got] == [True] * count + [False] * (3000 - count)


def test_top_p_exactly_at_a_boundary_needs_no_more() -> None:
    """(.5, .25, .25) with top_p .5: the first token holds the mass, nothing else is kept."""
    (got,) = probabilities(torch.tensor([[0.5, 0.25, 0.25]]).log(), SamplingParams(top_p=0.5))
    assert got == [1.0, 0.0, 0.0]


def test_top_p_is_renormalised_after_top_k() -> None:
    """Of (.4 .3 .2 .1), top_k 2 leaves (.57 .43): top_p .55 then keeps one, though .4 < .55 of the whole."""
    (got,) = probabilities(torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), SamplingParams(top_k=2, top_p=0.55))
    assert got == [1.0, 0.0, 0.0, 0.0]


def test_masked_tokens_never_come_back_through_a_cut() -> None:
    scores = torch.full((1, 1000), -math.inf)
    scores[0, [5, 900]] = torch.tensor([0.0, 1.0])
    for arguments in ({"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.001}):
        (got,) = probabilities(scores, SamplingParams(**arguments))
        assert [i for i, p in enumerate(got) if p > 0] == [5, 900]


def test_rows_with_different_cuts_share_a_batch() -> None:
    rng = random.Random(5)
    rows = [[rng.gauss(0, 1.0) for _ in range(600)] for _ in range(5)]
    params = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=400, top_p=0.9),
        SamplingParams(top_p=0.1, min_p=0.5),
    ]
    seen = set()
    for kept in cutoffs.cut(torch.tensor(rows), params):
        for row, values, ids in zip(kept.rows.tolist(), kept.scores, kept.ids, strict=True):
            expected = reference_cut(rows[row], params[row])
            alive = values != -math.inf
            assert sorted(ids[alive].tolist()) == [t for t, p in enumerate(expected) if p > 0]
            seen.add(row)
    assert seen == set(range(5))


def test_sorting_and_selecting_agree() -> None:
    """A device sorts, the host selects: the same tokens come first, in the same order, ties included."""
    rng = random.Random(6)
    scores = torch.tensor([[round(rng.gauss(0, 1.0), 1) for _ in range(900)] for _ in range(4)])
    scores[1, 40:] = -math.inf
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    for k in (1, 7, 100, 899, 5000):
        selected, tokens, lowest = cutoffs.select(scores, k)
        for row in range(4):
            count = int((ordered[row] >= ordered[row, min(k, 900) - 1]).logical_and(ordered[row] > -math.inf).sum())
            assert tokens[row, :count].tolist() == ids[row, :count].tolist()
            assert selected[row, :count].tolist() == ordered[row, :count].tolist()
            assert selected[row, count:].eq(-math.inf).all()
            assert lowest[row, 0] == ordered[row, min(k, 900) - 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_cuts_keep_what_is_not_finite_for_the_draw_to_find(bad: float) -> None:
    scores = torch.zeros(2, 500)
    scores[0, 77] = bad
    for arguments in ({"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.9}):
        for kept in cutoffs.cut(scores, [SamplingParams(**arguments)] * 2):
            for row, values in zip(kept.rows.tolist(), kept.scores, strict=True):
                clean = not (values.isnan() | (values == math.inf)).any()
                assert clean == (row == 1)


def test_reference_is_a_distribution() -> None:
    """The reference itself: greedy is one-hot on the lowest best id, sampling sums to one."""
    request = make_request(SamplingParams(temperature=0.0))
    assert reference_probabilities([1.0, 3.0, 3.0], request) == [0.0, 1.0, 0.0]
    assert sum(reference_probabilities([1.0, 3.0, 2.0], make_request(SamplingParams(top_k=2)))) == pytest.approx(1.0)
