"""A toy model of eight tokens, a decoding loop around the sampler, and the filters in slow, plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from phloem.batch import Segment
from phloem.drafts import Draft
from phloem.masks import MaskFiller, Masks
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.request import Request
from phloem.sampler import Head, Outcome, Sampler
from phloem.testing.toy_grammar import ToyMatcher

VOCAB = 8
END = 0
TEXTS = ["", "a", "b", "c", "d", "ab", "bc", "e"]  # of the toy vocabulary, for grammars

Model = Callable[[Sequence[int]], list[float]]
Drafter = Callable[[Request], Draft | None]


def toy_model(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> Model:
    """Logits after a text: random, but the same whenever the last three tokens and the length modulo 5 are."""

    def logits(tokens: Sequence[int]) -> list[float]:
        rng = random.Random(f"{seed}/{list(tokens[-3:])}/{len(tokens) % 5}")
        return [rng.gauss(0.0, spread) for _ in range(vocab)]

    return logits


@lru_cache
def compiled(pattern: str) -> ToyMatcher:
    """A matcher at its start, whose forks remember masks together."""
    return ToyMatcher(pattern, TEXTS, [END])


def make_request(
    params: SamplingParams | None = None, prompt: Sequence[int] = (1, 2), *, seed: int = 0, choice: int = 0
) -> Request:
    params = params or SamplingParams()
    call = GenerateCall(call_id=f"call{seed}", prompt=list(prompt), params=params)
    request = Request(call, choice, seed=seed, limit=10_000, arrival=0)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {END})
    request.stop_ids = frozenset(ends)
    if params.regex is not None:
        request.matcher = compiled(params.regex).fork()
    return request


def segment_of(request: Request, draft: Draft | None = None) -> Segment:
    return Segment(request, len(request.tokens) - 1, 1, True, draft)


def fill_masks(segments: Sequence[Segment], vocab: int = VOCAB) -> Masks | None:
    """The masks of one step."""
    return MaskFiller(vocab, torch.device("cpu")).fill(segments)


def head_of(logits: torch.Tensor) -> Head:
    """An output head whose logits [N, vocab] are known."""

    def head(rows: Sequence[int], few: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return logits[list(rows)], [logits[row, tokens] for row, tokens in few]

    return head


def run_step(model: Model, sampler: Sampler, segments: Sequence[Segment]) -> list[Outcome]:
    """Logits of all rows as the model gives them, masks, sampling."""
    rows = []
    for segment in segments:
        text = segment.request.tokens.tolist()
        rows.append(model(text))
        for node in range(len(segment.draft or ())):
            assert segment.draft is not None
            rows.append(model(text + [segment.draft.tokens[i] for i in segment.draft.path(node)]))
    logits = torch.tensor(rows)
    before = logits.clone()
    pending = sampler.start(head_of(logits), segments, fill_masks(segments, logits.shape[1]))
    outcomes = pending.outcomes()
    assert torch.equal(logits, before), "the sampler changed the logits"
    return outcomes


def decode(
    model: Model,
    requests: Sequence[Request],
    *,
    steps: int = 12,
    drafter: Drafter | None = None,
    processors: Mapping[str, Any] | None = None,
    vocab: int = VOCAB,
) -> list[list[int]]:
    """Outputs of at most `steps` tokens each; all unfinished requests share every step."""
    sampler = Sampler(vocab, processors or {})
    open_requests = list(requests)
    while open_requests:
        segments = [segment_of(r, drafter(r) if drafter else None) for r in open_requests]
        for segment, outcome in zip(segments, run_step(model, sampler, segments), strict=True):
            assert outcome.error is None, outcome.error
            assert len(outcome.tokens) == len(outcome.nodes) + 1
            request = segment.request
            for token in outcome.tokens:
                request.tokens.append(token)
                if request.matcher is not None:
                    assert request.matcher.accept(token)
                if token in request.stop_ids or request.output_len == steps:
                    open_requests.remove(request)
                    break
    return [request.output for request in requests]


def random_draft(rng: random.Random, nodes: int, vocab: int = VOCAB) -> Draft:
    """Any tree of at most `nodes` nodes with distinct siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(nodes):
        token, parent = rng.randrange(vocab), rng.randrange(-1, i)
        if (parent, token) not in set(zip(parents, tokens, strict=True)) and parent < len(tokens):
            tokens.append(token)
            parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


def reference_scores(
    logits: Sequence[float], request: Request, path: Sequence[int] = (), allowed: set[int] | None = None
) -> list[float]:
    """Scores before temperature, by the documented order, one token at a time."""
    p = request.params
    output = request.output + list(path)
    scores = list(logits)
    for token in range(len(scores)):
        if allowed is not None and token not in allowed:
            scores[token] = -math.inf
        if len(output) < p.min_tokens and token in request.stop_ids:
            scores[token] = -math.inf
        scores[token] += (p.logit_bias or {}).get(token, 0.0)
        if token in request.tokens[: request.prompt_len].tolist() + output:
            positive = scores[token] > 0
            scores[token] = scores[token] / p.repetition_penalty if positive else scores[token] * p.repetition_penalty
        scores[token] -= p.frequency_penalty * output.count(token)
        scores[token] -= p.presence_penalty * (token in output)
    return scores


def reference_cut(scores: Sequence[float], p: SamplingParams) -> list[float]:
    """Probabilities after temperature and cut-offs, in exact order: score descending, then token id."""
    heated = [score / p.temperature for score in scores]
    best = max(heated)
    mass = [math.exp(score - best) for score in heated]
    order = sorted((t for t in range(len(mass)) if mass[t] > 0), key=lambda t: (-heated[t], t))
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        total = math.fsum(mass[t] for t in order)
        count = next(
            (i for i in range(1, len(order)) if math.fsum(mass[t] for t in order[:i]) >= p.top_p * total), None
        )
        order = order[:count]
    if p.min_p > 0.0:
        order = [t for t in order if mass[t] >= p.min_p]
    total = math.fsum(mass[t] for t in order)
    return [mass[t] / total if t in order else 0.0 for t in range(len(mass))]


def reference_probabilities(
    logits: Sequence[float], request: Request, path: Sequence[int] = (), allowed: set[int] | None = None
) -> list[float]:
    """The distribution of the next token."""
    scores = reference_scores(logits, request, path, allowed)
    if request.params.greedy:
        return [float(token == scores.index(max(scores))) for token in range(len(scores))]
    return reference_cut(scores, request.params)
