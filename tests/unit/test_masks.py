"""Grammar masks over draft trees: each node's mask is the one after its path; matchers are left as found."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sampling_rig import END, TEXTS, VOCAB, fill_masks, make_request, random_draft, run_step, segment_of, toy_model

from phloem.drafts import Draft
from phloem.errors import RequestError, StepError
from phloem.params import SamplingParams
from phloem.sampler import Sampler
from phloem.testing.toy_grammar import ToyMatcher

torch.set_num_threads(1)
PATTERN = "((a|bc?|ab)d?)+"


def bits(row: torch.Tensor, vocab: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:vocab]).tolist())


def mask_after(path: list[int]) -> set[int] | None:
    """By a fresh matcher; None if the path is forbidden or ends the output."""
    matcher = ToyMatcher(PATTERN, TEXTS, [END])
    if END in path or not all(matcher.accept(token) for token in path):
        return None
    return {token for token in range(VOCAB) if matcher.fork().accept(token)}


@pytest.mark.parametrize("seed", range(25))
def test_every_node_has_the_mask_of_its_path(seed: int) -> None:
    draft = random_draft(random.Random(seed), 14)
    request = make_request(SamplingParams(regex=PATTERN))
    masks = fill_masks([segment_of(request, draft)], VOCAB)
    assert masks is not None
    assert masks.bits.dtype == torch.int32
    assert masks.bits.shape == (len(draft) + 1, 1)
    for node in range(-1, len(draft)):
        expected = mask_after([draft.tokens[i] for i in draft.path(node)])
        assert bits(masks.bits[node + 1]) == (set(range(VOCAB)) if expected is None else expected)
    assert request.matcher is not None
    assert {t for t in range(VOCAB) if request.matcher.fork().accept(t)} == mask_after([])


def test_a_deep_chain_needs_no_recursion() -> None:
    draft = Draft.chain([1] * 3000)
    masks = fill_masks([segment_of(make_request(SamplingParams(regex="a+")), draft)], VOCAB)
    assert masks is not None
    assert all(bits(row) == {END, 1} for row in masks.bits[1:])


def test_rows_of_unconstrained_requests_are_all_ones() -> None:
    free, bound = make_request(), make_request(SamplingParams(regex="a"))
    segments = [segment_of(free, Draft.chain([1, 2])), segment_of(bound), segment_of(free)]
    masks = fill_masks(segments, 70)
    assert masks is not None
    assert masks.bits.shape == (5, 3)
    assert all(bits(masks.bits[row], 96) == set(range(70)) for row in (0, 1, 2, 4))
    assert masks.counts.tolist() == [70, 70, 70, 1, 70]
    assert masks.bits[3, 1:].eq(0).all()


def test_no_masks_without_constraints() -> None:
    assert fill_masks([segment_of(make_request())], VOCAB) is None
    assert fill_masks([], VOCAB) is None


class FailingMatcher(ToyMatcher):
    """Raises after its first token, as a broken backend might."""

    error: Exception = ZeroDivisionError("broken")

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        if len(self._states) > 1:
            raise self.error
        super().fill(row)


@pytest.mark.parametrize("error", [ZeroDivisionError("broken"), RequestError("too hard", param="regex")])
def test_a_matcher_that_raises_fails_its_own_request_only(error: Exception) -> None:
    bad, good = make_request(SamplingParams(regex="a+")), make_request(SamplingParams(regex="b+"))
    bad.matcher = FailingMatcher("a+", TEXTS, [END])
    bad.matcher.error = error
    sampler = Sampler(VOCAB, {})
    segments = [segment_of(bad, Draft.chain([1])), segment_of(good, Draft.chain([2]))]
    failed, fine = run_step(toy_model(), sampler, segments)
    assert failed.tokens == []
    if isinstance(error, RequestError):
        assert failed.error is error
    else:
        assert isinstance(failed.error, StepError)
        assert failed.error.message == "the grammar of call0/0 failed: ZeroDivisionError('broken')"
    assert fine.error is None
    assert fine.tokens[0] == 2
