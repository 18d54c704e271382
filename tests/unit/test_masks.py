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
from phloem.masks import DEAD, MaskFiller, Masks
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


@pytest.mark.parametrize("seed", range(25))
def test_counts_and_dead_rows(seed: int) -> None:
    """A count is that of the row's mask; a node is dead exactly if its path is forbidden or has ended before it."""
    draft = random_draft(random.Random(seed), 14)
    masks = fill_masks([segment_of(make_request(SamplingParams(regex=PATTERN)), draft)], VOCAB)
    assert masks is not None
    for node in range(-1, len(draft)):
        expected = mask_after([draft.tokens[i] for i in draft.path(node)])
        assert masks.counts[node + 1] == (DEAD if expected is None else len(expected))
        if expected is not None:
            assert masks.tokens([node + 1])[0].tolist() == sorted(expected)


def test_tokens_of_several_rows() -> None:
    """Rows in any order, empty ones too, tokens at both ends of a word and of the vocabulary."""
    table = np.zeros((4, 100), dtype=np.bool_)
    sets = [[0, 31, 32, 99], [], list(range(100)), [63, 64]]
    for row, allowed in enumerate(sets):
        table[row, allowed] = True
    packed = np.packbits(np.pad(table, ((0, 0), (0, 28))), axis=1, bitorder="little").view(np.int32)
    masks = Masks(torch.from_numpy(packed), table.sum(1))
    for rows in ([0, 1, 2, 3], [3, 1, 0], [2], [1, 1], []):
        assert [tokens.tolist() for tokens in masks.tokens(rows)] == [sets[row] for row in rows]


def test_before_a_forced_node_only_its_token_is_allowed() -> None:
    """Lossy forcing: the rows of the forced nodes' parents; what follows the last of them is free."""
    draft = Draft((1, 4, 2, 6), (-1, 0, 1, 1), forced=2)
    request = make_request(SamplingParams(regex=PATTERN))
    masks = fill_masks([segment_of(request, draft)], VOCAB)
    assert masks is not None
    assert [bits(row) for row in masks.bits[:2]] == [{1}, {4}]
    assert bits(masks.bits[2]) == mask_after([1, 4])
    assert masks.counts[:2].tolist() == [1, 1]
    (out,) = run_step(toy_model(), Sampler(VOCAB, {}), [segment_of(request, draft)])
    assert out.tokens[:2] == [1, 4]


def test_a_forced_token_that_the_grammar_forbids_is_not_forced() -> None:
    masks = fill_masks([segment_of(make_request(SamplingParams(regex="ab")), Draft((3, 1), (-1, 0), forced=2))], VOCAB)
    assert masks is not None
    assert bits(masks.bits[0]) == {1, 5}
    assert masks.counts.tolist() == [2, DEAD, DEAD]


class Untidy(ToyMatcher):
    """Leaves rubbish behind the vocabulary."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        super().fill(row)
        row.view(np.uint32)[-1] |= np.uint32(0xFFFFFFFF << VOCAB & 0xFFFFFFFF)


def test_bits_behind_the_vocabulary_do_not_count() -> None:
    request = make_request(SamplingParams(regex="a"))
    request.matcher = Untidy("a", TEXTS, [END])
    masks = fill_masks([segment_of(request)], VOCAB)
    assert masks is not None
    assert masks.counts.tolist() == [1]
    assert masks.tokens([0])[0].tolist() == [1]


def test_two_buffers_in_turn_grow_and_are_used_again() -> None:
    """A step's masks outlive the filling of the next one, whatever its size, and nothing of an older step is left."""
    filler = MaskFiller(VOCAB, torch.device("cpu"))
    held: list[tuple[Masks, list[set[int]]]] = []
    addresses = set()
    for step in range(40):
        kinds = [(step + i) % 2 for i in range(1 + step % 5)]
        requests = [make_request(SamplingParams(regex="ab+" if kind else "c")) for kind in kinds]
        free = make_request()
        masks = filler.fill([segment_of(free), *(segment_of(request) for request in requests)])
        assert masks is not None
        expected = [set(range(VOCAB)), *({1, 5} if kind else {3} for kind in kinds)]
        held.append((masks, expected))
        for older, values in held[-2:]:
            assert [bits(row) for row in older.bits] == values
        addresses.add(masks.bits.data_ptr())
        assert filler.fill([segment_of(free)]) is None  # a step without constraints takes no turn
    assert len(addresses) <= 6  # grown a few times, not allocated anew each step


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
    masks = fill_masks(segments)
    assert masks is not None
    assert masks.counts.tolist()[:2] == [0, 0]  # no more work is done for it
    failed, fine = run_step(toy_model(), sampler, segments)
    assert failed.tokens == []
    if isinstance(error, RequestError):
        assert failed.error is error
    else:
        assert isinstance(failed.error, StepError)
        assert failed.error.message == "the grammar of call0/0 failed: ZeroDivisionError('broken')"
    assert fine.error is None
    assert fine.tokens[0] == 2
