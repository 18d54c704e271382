"""Sampling and verification are one pipeline: drafts, company and batching change no output (design §6)."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rig import (
    END,
    Drafter,
    decode,
    make_request,
    random_draft,
    reference_probabilities,
    toy_model,
)
from scipy import stats

from phloem.drafts import Draft, merge
from phloem.interfaces import RowContext
from phloem.params import SamplingParams
from phloem.request import Request
from phloem.verifier import walk

torch.set_num_threads(1)
MODEL = toy_model()


class Favour:
    """A custom processor that looks at all of its context."""

    def validate(self, arguments: dict[str, Any]) -> None:
        assert arguments

    def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
        for row, context in zip(logits, rows, strict=True):
            row[sum([*context.prompt, *context.output]) % logits.shape[1]] += context.arguments["strength"]


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=3.0, ignore_eos=True),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.2, temperature=2.0),
    "all cuts": SamplingParams(top_k=5, top_p=0.9, min_p=0.05, temperature=1.5),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.4, temperature=1.3),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.7),
    "min_tokens": SamplingParams(min_tokens=5, stop_token_ids=[3], logit_bias={0: 4.0, 3: 4.0}),
    "bias": SamplingParams(logit_bias={5: 3.0, 6: -100.0}),
    "grammar": SamplingParams(regex="((ab|c|d)(a|e))+"),
    "greedy grammar": SamplingParams(regex="(a?b?c)+d", temperature=0.0),
    "grammar and more": SamplingParams(regex="([a-d]e?)+", top_k=4, frequency_penalty=0.5),
    "processor": SamplingParams(logits_processors={"favour": {"strength": 3.0}}, temperature=0.8),
}


def requests(name: str, seeds: range = range(4)) -> list[Request]:
    return [make_request(PARAMS[name], (1, 2, seed % 7), seed=seed, choice=seed % 2) for seed in seeds]


def run(name: str, drafter: Drafter | None = None, seeds: range = range(4)) -> list[list[int]]:
    return decode(MODEL, requests(name, seeds), drafter=drafter, processors={"favour": Favour()})


def drafter_of(kind: str, name: str) -> Drafter:
    """Right, wrong, arbitrary and merged drafts for the requests of `name`."""
    truth = {tuple(r.tokens): out for r, out in zip(requests(name), run(name), strict=True)}
    rng = random.Random(kind + name)

    def right(request: Request) -> Draft | None:
        rest = truth[tuple(request.tokens[: request.prompt_len])][request.output_len :][:5]
        return Draft.chain(rest) if rest else None

    def wrong(request: Request) -> Draft | None:
        draft = right(request)
        return draft and Draft.chain([(token + 1 + i) % 8 for i, token in enumerate(draft.tokens)])

    def late(request: Request) -> Draft | None:
        """Right at first, wrong at its end."""
        draft = right(request)
        return draft and Draft.chain([*draft.tokens[:-1], (draft.tokens[-1] + 1) % 8])

    def tree(request: Request) -> Draft | None:
        return random_draft(rng, 7)

    def merged(request: Request) -> Draft | None:
        parts = [draft for draft in (right(request), late(request), wrong(request), tree(request)) if draft]
        return merge(parts, 12)

    return {"right": right, "wrong": wrong, "late": late, "tree": tree, "merged": merged}[kind]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("kind", ["right", "wrong", "late", "tree", "merged"])
def test_drafts_change_no_output(name: str, kind: str) -> None:
    """Seeded and greedy outputs are those of plain decoding, whatever is proposed."""
    assert run(name, drafter_of(kind, name)) == run(name)


def test_right_drafts_are_accepted() -> None:
    """Or else the test above shows nothing: a right chain is emitted whole, and one token more."""
    steps = 0

    def counting(request: Request) -> Draft | None:
        nonlocal steps
        steps += 1
        return right(request)

    right = drafter_of("right", "hot")
    outputs = run("hot", counting)
    assert [len(out) for out in outputs] == [12] * 4
    assert steps == 4 * 2  # 5 drafted and 1 own token, twice


@pytest.mark.parametrize("name", PARAMS)
def test_company_changes_no_output(name: str) -> None:
    """The same requests among others of every kind, and in another order."""
    alone = run(name)
    own = requests(name)
    others = [request for other in PARAMS for request in requests(other, range(10, 12))]
    decode(MODEL, [*others[:9], *own[::-1], *others[9:]], processors={"favour": Favour()})
    assert [request.output for request in own] == alone


@pytest.mark.parametrize("name", ["plain", "top_k", "all cuts", "penalties", "grammar and more", "min_tokens"])
def test_two_tokens_have_the_distribution_of_the_reference(name: str) -> None:
    """what-breaks 41: chi-square of the pairs of 1,500 seeds, with random trees as drafts, against exact counts."""
    rng = random.Random(name)
    drawn = [make_request(PARAMS[name], (4, 5), seed=seed) for seed in range(1500)]
    drafts = [random_draft(rng, 5) for _ in range(50)]
    outputs = decode(MODEL, drawn, steps=2, drafter=lambda _: rng.choice(drafts))
    seen = Counter(tuple(out) for out in outputs)
    expected = dict(pairs(name))
    assert set(seen) <= set(expected)
    rare = [pair for pair, p in expected.items() if p * len(drawn) < 5]
    common = [pair for pair in expected if pair not in rare]
    counts = [seen[pair] for pair in common] + [sum(seen[pair] for pair in rare)]
    masses = [expected[pair] for pair in common] + [sum(expected[pair] for pair in rare)]
    alive = [i for i, mass in enumerate(masses) if mass > 0]
    total = sum(masses)
    result = stats.chisquare([counts[i] for i in alive], [masses[i] * len(drawn) / total for i in alive])
    assert result.pvalue > 1e-4


def pairs(name: str) -> list[tuple[tuple[int, ...], float]]:
    """Every first two tokens with their exact probability."""
    found = []
    request = make_request(PARAMS[name], (4, 5))
    for first, p in enumerate(reference_probabilities(MODEL([4, 5]), request, (), allowed_by(request))):
        if not p:
            continue
        if first in request.stop_ids:
            found.append(((first,), p))
            continue
        if request.matcher is not None:
            request.matcher.accept(first)
        after = reference_probabilities(MODEL([4, 5, first]), request, (first,), allowed_by(request))
        found += [((first, second), p * q) for second, q in enumerate(after) if q]
        if request.matcher is not None:
            request.matcher.rollback(1)
    return found


def allowed_by(request: Request) -> set[int] | None:
    if request.matcher is None:
        return None
    return {token for token in range(8) if request.matcher.fork().accept(token)}


TREES = [
    Draft((), ()),
    Draft.chain([1, 2, 0]),
    Draft((2, 1, 0, 1), (-1, -1, 0, 2)),
    Draft((0, 1, 2, 0), (-1, -1, -1, 1)),
    merge([Draft.chain([1, 1]), Draft.chain([1, 2]), Draft.chain([2, 1])], 4),
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["plain", "penalties", "top_p", "grammar", "min_tokens"])
def test_the_walk_is_exact(tree: Draft, name: str) -> None:
    """Enumerate every joint outcome of the nodes' draws: emitted sequences have the target's distribution.

    Of each sequence that plain sampling may write, the walk emits a beginning; a beginning's mass is the sum over
    the sequences that go on from it, however the tree looks.
    """
    rows = [node_distribution(name, tree, node) for node in range(-1, len(tree))]
    emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for samples in itertools.product(*[[t for t in range(8) if row[t]] for row in rows]):
        tokens, nodes = walk(tree, samples, make_request(PARAMS[name]).stop_ids)
        assert [tree.tokens[node] for node in nodes] == tokens[:-1]
        emitted[tuple(tokens)] += math.prod(row[t] for row, t in zip(rows, samples, strict=True))
    assert sum(emitted.values()) == pytest.approx(1.0)
    for sequence, mass in emitted.items():
        assert mass == pytest.approx(plain_probability(name, sequence)), sequence


def node_distribution(name: str, tree: Draft, node: int) -> list[float]:
    path = [tree.tokens[i] for i in tree.path(node)]
    request = make_request(PARAMS[name], (4, 5))
    if request.matcher is not None and not all(request.matcher.accept(token) for token in path):
        return [0.5, 0.5, *[0.0] * 6]  # cannot be reached: anything will do
    return reference_probabilities(MODEL([4, 5, *path]), request, path, allowed_by(request))


def plain_probability(name: str, sequence: tuple[int, ...]) -> float:
    request = make_request(PARAMS[name], (4, 5))
    mass = 1.0
    for i, token in enumerate(sequence):
        path = sequence[:i]
        mass *= reference_probabilities(MODEL([4, 5, *path]), request, path, allowed_by(request))[token]
        if request.matcher is not None:
            request.matcher.accept(token)
    return mass


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 7), min_size=9, max_size=9))
def test_walk_against_its_definition(seed: int, samples: list[int]) -> None:
    """Token by token: emit the sample, follow the child that equals it, stop where there is none."""
    draft = random_draft(random.Random(seed), 8)
    samples = samples[: len(draft) + 1]
    tokens, nodes = walk(draft, samples, frozenset({END}))
    node = -1
    for i, token in enumerate(tokens):
        assert token == samples[node + 1]
        matching = [c for c in range(len(draft)) if draft.parents[c] == node and draft.tokens[c] == token]
        if i < len(nodes):
            assert token != END
            assert matching == [nodes[i]]
            node = nodes[i]
        else:
            assert not matching or token == END
    assert len(tokens) == len(nodes) + 1


def test_nothing_follows_an_end_token() -> None:
    assert walk(Draft.chain([3, END, 4]), [3, END, 4, 5], frozenset({END})) == ([3, END], [0])
    assert walk(Draft.chain([3, END, 4]), [3, END, 4, 5]) == ([3, END, 4, 5], [0, 1, 2])


def test_a_row_that_could_not_be_sampled_ends_the_walk_only_where_it_is_reached() -> None:
    assert walk(Draft.chain([3, 4]), [3, -1, 5]) == ([3], [0])
    assert walk(Draft.chain([3, 4]), [2, -1, 5]) == ([2], [])
    assert walk(None, [-1]) == ([], [])


def test_top_children_as_draws_would_be_biased_but_this_walk_is_not() -> None:
    """Design §6's example: target (.5 .3 .15 .05), its two top tokens drafted. Every token keeps its probability."""
    target = [0.5, 0.3, 0.15, 0.05]
    tree = Draft((0, 1), (-1, -1))
    first: defaultdict[int, float] = defaultdict(float)
    for samples in itertools.product(range(4), repeat=3):
        first[walk(tree, samples)[0][0]] += math.prod(target[t] for t in samples)
    assert [first[t] for t in range(4)] == pytest.approx(target)
