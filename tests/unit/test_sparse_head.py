"""Rows of few tokens: sampled from a table of these, with their columns of the head only, as if from all logits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampling_rig import fill_masks, make_request, segment_of

from bench import masks as bench_masks
from phloem import sampler as sampling
from phloem.batch import Segment
from phloem.drafts import Draft
from phloem.errors import RequestError, StepError
from phloem.interfaces import Matcher
from phloem.params import SamplingParams
from phloem.request import Request
from phloem.sampler import FEW_TOKENS, Outcome, Sampler

torch.set_num_threads(1)
VOCAB = 700
END = 0


class SetMatcher:
    """Allows a set of tokens that depends on the number of tokens accepted; `None` stands for all."""

    def __init__(self, sets: Sequence[Sequence[int] | None]) -> None:
        self.sets = [list(range(VOCAB)) if allowed is None else list(allowed) for allowed in sets]
        self.depth = 0

    def fill(self, row: Any) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.bool_)
        bits[self._allowed()] = True
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        fits = token in self._allowed()
        self.depth += fits
        return fits

    def rollback(self, tokens: int) -> None:
        self.depth -= tokens

    def is_complete(self) -> bool:
        return False

    def forced(self) -> bytes:
        return b""

    def fork(self) -> Matcher:
        twin = SetMatcher(self.sets)
        twin.depth = self.depth
        return twin

    def _allowed(self) -> list[int]:
        return self.sets[min(self.depth, len(self.sets) - 1)]


class CountingHead:
    """Serves known logits [N, VOCAB] and notes what it was asked for."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.full: list[int] = []
        self.few: dict[int, list[int]] = {}

    def __call__(
        self, rows: Sequence[int], few: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.full = list(rows)
        self.few = {row: tokens.tolist() for row, tokens in few}
        return self.logits[self.full], [self.logits[row, tokens] for row, tokens in few]


def constrained(params: SamplingParams, *sets: Sequence[int] | None, seed: int = 0) -> Request:
    request = make_request(params, seed=seed)
    request.matcher = SetMatcher(sets)
    return request


def step(
    segments: Sequence[Segment], seed: int = 0, processors: dict[str, Any] | None = None
) -> tuple[Any, list[Outcome]]:
    """Outcomes over random logits, and the head that was asked."""
    rows = sum(1 + len(segment.draft or ()) for segment in segments)
    head = CountingHead(torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3)
    pending = Sampler(VOCAB, processors or {}).start(head, segments, fill_masks(segments, VOCAB))
    assert pending.tokens.min() >= 0
    assert pending.tokens.max() < VOCAB
    return head, pending.outcomes()


SETS: dict[str, list[int]] = {
    "one": [5],
    "two": [3, 699],
    "some": [0, 1, 2, 40, 41, 350, 698],
    "most few": list(range(100, 100 + FEW_TOKENS)),
    "many": list(range(0, 699, 2)),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "free": {"temperature": 1.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.6, "temperature": 2.0},
    "min_p": {"min_p": 0.2, "temperature": 3.0},
    "bias": {"logit_bias": {3: 4.0, 41: -3.0, 5: -100.0, 200: 50.0, 699: 1.5}},
    "greedy bias": {"temperature": 0.0, "logit_bias": {3: 4.0, 101: 9.0, 200: 50.0}},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "min_tokens": {"min_tokens": 4},
    "cut and bias": {"top_k": 3, "top_p": 0.8, "logit_bias": {2: 3.0, 110: 4.0}, "min_tokens": 2},
}


@pytest.mark.parametrize("name", PARAMS)
def test_few_tokens_are_sampled_as_from_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all sizes of sets in one batch, against the same batch with the table of few tokens switched off."""
    for seed in range(6):

        def segments(seed: int = seed) -> list[Segment]:
            made = []
            for i, allowed in enumerate([*SETS.values(), None]):
                request = constrained(SamplingParams(**PARAMS[name]), allowed, SETS["some"], None, seed=seed + i)
                request.tokens.extend([40, 41, 350])
                made.append(segment_of(request, Draft.chain([(allowed or [7])[0], 350]) if i % 2 else None))
            made.append(segment_of(make_request(SamplingParams(**PARAMS[name]), seed=seed)))
            return made

        head, sparse = step(segments(), seed)
        assert head.few
        assert all(1 <= len(tokens) <= FEW_TOKENS for tokens in head.few.values())
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "FEW_TOKENS", 0)
            head, dense = step(segments(), seed)
            assert not head.few
        assert [(o.tokens, o.nodes, o.error) for o in sparse] == [(o.tokens, o.nodes, o.error) for o in dense]


def test_what_is_certain_or_dead_asks_nothing_of_the_head() -> None:
    """A chain with a certain node, one of few tokens, one of many, one forbidden, and what lies below it."""
    request = constrained(SamplingParams(temperature=0.0), [5], [6, 7], SETS["many"], [8])
    head, (out,) = step([segment_of(request, Draft((5, 6, 9, 2), (-1, 0, 1, 2)))])
    assert head.full == [2]
    assert head.few == {1: [6, 7]}
    assert out.tokens[0] == 5
    assert out.error is None


def test_a_certain_token_is_emitted_whatever_its_logit() -> None:
    """Not sampled: a logit of minus infinity or NaN is not even looked at."""
    request = constrained(SamplingParams(), [5])
    head = CountingHead(torch.full((1, VOCAB), math.nan))
    segments = [segment_of(request)]
    (out,) = Sampler(VOCAB, {}).start(head, segments, fill_masks(segments, VOCAB)).outcomes()
    assert (out.tokens, head.full, head.few) == ([5], [], {})


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_need_all_logits_of_every_live_row(mode: str) -> None:
    """what-breaks 44: raw logprobs are those of the unconstrained model, a certain token's included."""
    params = SamplingParams(logprobs=3, logprobs_mode=mode, temperature=0.0)
    request = constrained(params, [5], [6, 7], [8])
    head, (out,) = step([segment_of(request, Draft((9, 5), (-1, -1)))])  # the first node is forbidden
    assert (head.full, head.few) == ([0, 2], {})
    assert out.logprobs is not None
    assert out.tokens[0] == 5
    for i, entry in enumerate(out.logprobs):
        source = head.logits[2 * i].clone()
        if mode == "processed":
            source[[t for t in range(VOCAB) if t not in ([5], [6, 7])[i]]] = -math.inf
        assert entry.logprob == pytest.approx(float(source.log_softmax(-1)[entry.token_id]), abs=1e-4)
        assert len(entry.top) == (3 if mode == "raw" else i + 1)


class Notes:
    """A processor that wants whole rows."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def validate(self, arguments: dict[str, Any]) -> None:
        assert not arguments

    def process(self, logits: torch.Tensor, rows: Sequence[Any]) -> None:
        self.shapes.append((tuple(logits.shape), [row.output for row in rows]))
        logits[:, 6] = -math.inf


def test_custom_processors_see_whole_rows_of_live_nodes() -> None:
    notes = Notes()
    request = constrained(SamplingParams(temperature=0.0, logits_processors={"notes": {}}), [5], [6, 7], None)
    head, (out,) = step([segment_of(request, Draft((5, 9, 7), (-1, 0, 0)))], processors={"notes": notes})
    assert (head.full, head.few) == ([0, 1, 3], {})
    assert notes.shapes == [((3, VOCAB), [[], [5], [5, 7]])]
    assert out.tokens[:2] == [5, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_against_few_tokens(temperature: float) -> None:
    """A certain end token is forbidden by min_tokens, as it would be with all logits; one of several is not drawn."""
    params = SamplingParams(min_tokens=3, temperature=temperature)
    _, (out,) = step([segment_of(constrained(params, [END]))])
    assert isinstance(out.error, RequestError)
    assert out.error.message == "the grammar allows only end tokens at output position 0, which min_tokens=3 forbids"
    for seed in range(20):
        _, (out,) = step([segment_of(constrained(params, [END, 9], seed=seed))], seed)
        assert out.tokens == [9]


@pytest.mark.parametrize("size", [3, 300])
def test_min_tokens_counts_positions_past_dead_nodes(size: int) -> None:
    """A node behind a dead one decides the position that it is deep, in tables of few and of all tokens."""
    params = SamplingParams(min_tokens=2, temperature=0.0)
    request = constrained(params, [5], [6], list(range(size)))
    logits = torch.zeros(4, VOCAB)
    logits[:, END] = 9.0
    segments = [segment_of(request, Draft((9, 5, 6), (-1, -1, 1)))]
    (out,) = Sampler(VOCAB, {}).start(CountingHead(logits), segments, fill_masks(segments, VOCAB)).outcomes()
    assert out.tokens == [5, 6, END]


def test_nothing_allowed_is_an_error_without_any_logits() -> None:
    head, (empty, other) = step(
        [segment_of(constrained(SamplingParams(), [])), segment_of(constrained(SamplingParams(), [4]))]
    )
    assert (head.full, head.few) == ([], {})
    assert empty.error is not None
    assert empty.error.message == "the grammar allows no token of this vocabulary at output position 0"
    assert other.tokens == [4]


class Fickle(SetMatcher):
    """Refuses what its mask allows."""

    def accept(self, token: int) -> bool:
        return False


def test_a_grammar_that_refuses_what_it_allowed_ends_its_request() -> None:
    """The walk comes to a node that was taken for dead: what was emitted before stays."""
    request = constrained(SamplingParams(), [5])
    request.matcher = Fickle([[5]])
    _, (out,) = step([segment_of(request, Draft.chain([5]))])
    assert (out.tokens, out.nodes) == ([5], [0])
    assert isinstance(out.error, StepError)
    assert out.error.message == "the grammar forbids the token before output position 1, which its mask allowed"


@pytest.mark.real
def test_the_bench_prints_every_row() -> None:
    """With few rounds and the default model; figures are whatever they are."""
    pytest.importorskip("llguidance")
    lines: list[Any] = []
    assert bench_masks.main(["--rounds", "4", "--grammar", "llguidance"], lines.append) == 0
    table = [line.split("|") for line in lines if line.startswith("| ")]
    assert [row[1].strip() for row in table[1:5]] == [str(rows) for rows in bench_masks.ROWS]
    assert [row[1].strip() for row in table[6:] if row[1].strip().isdigit()][-1] == str(bench_masks.COLUMNS[-1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["greedy", "free", "top_k", "top_p"])
def test_bad_logits_of_few_tokens_fail_their_request_only(name: str, bad: float) -> None:
    segments = [segment_of(constrained(SamplingParams(**PARAMS[name]), [3, 4, 9], seed=i)) for i in range(2)]
    logits = torch.zeros(2, VOCAB)
    logits[0, 4] = bad
    logits[1, 5] = math.nan  # a forbidden token's, which is not looked at
    broken, fine = Sampler(VOCAB, {}).start(CountingHead(logits), segments, fill_masks(segments, VOCAB)).outcomes()
    assert isinstance(broken.error, StepError)
    assert broken.error.message == "the model's logits hold NaN or infinity at output position 0"
    assert fine.tokens[0] in (3, 4, 9)


def test_draws_from_few_tokens_have_their_distribution() -> None:
    """Exact by the noise: over many seeds, frequencies are those of the softmax over the allowed set."""
    allowed, logits = [2, 77, 300], torch.zeros(1, VOCAB)
    logits[0, allowed] = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(-1)
    seen = [0, 0, 0]
    segments = [segment_of(constrained(SamplingParams(), allowed, seed=seed)) for seed in range(4000)]
    pending = Sampler(VOCAB, {}).start(CountingHead(logits.expand(4000, -1)), segments, fill_masks(segments, VOCAB))
    for out in pending.outcomes():
        seen[allowed.index(out.tokens[0])] += 1
    chi = sum((n - 4000 * float(p)) ** 2 / (4000 * float(p)) for n, p in zip(seen, expected, strict=True))
    assert chi < 13.8, seen  # p = 0.001 of two degrees of freedom


def test_ties_among_few_tokens_go_to_lower_ids() -> None:
    for params, order in itertools.product(({"temperature": 0.0}, {"top_k": 1}), ([9, 3, 699], [699, 640, 650])):
        segments = [segment_of(constrained(SamplingParams(**params), order, [1, 2, 3, 4]))]
        (out,) = (
            Sampler(VOCAB, {})
            .start(CountingHead(torch.zeros(1, VOCAB)), segments, fill_masks(segments, VOCAB))
            .outcomes()
        )
        assert out.tokens == [min(order)]


def test_few_and_many_in_random_batches_match_switching_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees, random sets per depth, random parameters, free requests between them."""
    for seed in range(25):
        _, sparse = step(random_segments(random.Random(seed)), seed)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "FEW_TOKENS", 0)
            _, dense = step(random_segments(random.Random(seed)), seed)
        assert [(o.tokens, o.nodes) for o in sparse] == [(o.tokens, o.nodes) for o in dense]
        assert [o.error and str(o.error) for o in sparse] == [o.error and str(o.error) for o in dense]


def random_segments(rng: random.Random) -> list[Segment]:
    made = []
    for i in range(rng.randint(1, 6)):
        params = SamplingParams(**PARAMS[rng.choice(list(PARAMS))])
        sets = [sorted(rng.sample(range(VOCAB), rng.choice([1, 1, 3, 90, 128, 129, 500]))) for _ in range(4)]
        request = constrained(params, *sets, seed=i) if rng.random() < 0.8 else make_request(params, seed=i)
        nodes = rng.randint(0, 6)
        tokens = tuple(rng.choice(sets[min(node, 3)]) for node in range(nodes))
        draft = Draft(tokens, tuple(rng.randint(-1, node - 1) for node in range(nodes)))
        made.append(segment_of(request, draft if nodes and draft.problem(VOCAB, nodes) is None else None))
    return made
