"""What the sampler reports: samples on the device, logprobs of emitted rows, errors of single requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_rig import (
    VOCAB,
    fill_masks,
    head_of,
    make_request,
    reference_probabilities,
    run_step,
    segment_of,
    toy_model,
)

from phloem.drafts import Draft
from phloem.errors import PluginError, RequestError, StepError
from phloem.interfaces import RowContext
from phloem.messages import TokenLogprob
from phloem.params import SamplingParams
from phloem.sampler import Outcome, Sampler, prompt_logprobs

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0.0)


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(value) for value in row))
    return [value - total for value in row]


def sample(rows: list[list[float]], *params: SamplingParams, processors: dict[str, Any] | None = None) -> list[Outcome]:
    segments = [segment_of(make_request(p, seed=i)) for i, p in enumerate(params)]
    sampler = Sampler(len(rows[0]), processors or {})
    return sampler.start(head_of(torch.tensor(rows)), segments, fill_masks(segments, len(rows[0]))).outcomes()


def test_greedy_takes_the_best_and_of_equals_the_lowest() -> None:
    rows = [[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]]
    assert [out.tokens for out in sample(rows, GREEDY, GREEDY, GREEDY)] == [[1], [0], [3]]
    edited = SamplingParams(temperature=0.0, logit_bias={0: 0.0})
    assert [out.tokens for out in sample(rows, edited, edited, edited)] == [[1], [0], [3]]


def test_tokens_are_there_before_outcomes_in_row_order() -> None:
    """Groups are sampled apart, but every row's token lies at its row; int64, one per row, drafts included."""
    params = [SamplingParams(top_k=1), GREEDY, SamplingParams(logit_bias={4: 50.0}), SamplingParams(temperature=1e-4)]
    segments = [segment_of(make_request(p), Draft.chain([3, 5]) if p.greedy else None) for p in params]
    logits = torch.zeros(6, VOCAB)
    logits[torch.arange(6), torch.tensor([7, 3, 5, 6, 1, 2])] = 3.0
    pending = Sampler(VOCAB, {}).start(head_of(logits), segments)
    assert pending.tokens.dtype == torch.int64
    assert pending.tokens.tolist() == [7, 3, 5, 6, 4, 2]
    assert [out.tokens for out in pending.outcomes()] == [[7], [3, 5, 6], [4], [2]]
    assert [out.nodes for out in pending.outcomes()] == [[], [0, 1], [], []]


def test_flat_and_steep_rows_share_a_large_vocabulary() -> None:
    """Rows need different numbers of candidates; each draws what it draws alone, in any order."""
    rows = [
        [((token * 7919 + i) % 3001) * spread for token in range(3001)] for i, spread in enumerate((0.0, 0.01, 1e-4))
    ]
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.8, min_p=0.01), SamplingParams(top_p=0.95), GREEDY]
    sampler = Sampler(3001, {})
    for order in ((0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 1, 0)):
        segments = [segment_of(make_request(params[i], seed=i)) for i in order]
        logits = torch.tensor([rows[min(i, 2)] for i in order])
        together = [out.tokens for out in sampler.start(head_of(logits), segments).outcomes()]
        alone = [sampler.start(head_of(logits[i : i + 1]), [s]).outcomes()[0].tokens for i, s in enumerate(segments)]
        assert together == alone
    flat = sampler.start(head_of(torch.zeros(1, 3001)), [segment_of(make_request(params[0]))]).outcomes()[0]
    assert 0 <= flat.tokens[0] < 2701


def test_an_empty_step_has_no_outcomes() -> None:
    assert Sampler(VOCAB, {}).start(head_of(torch.zeros(0, VOCAB)), []).outcomes() == []


def test_positions_come_from_the_segment_not_from_the_tokens_on_the_host() -> None:
    """Running ahead, the newest token is not on the host yet: the sample must be the same."""
    model, params = toy_model(3), SamplingParams(min_tokens=2, stop_token_ids=[1])
    full = make_request(params, seed=5)
    full.tokens.extend([4, 6])
    ahead = make_request(params, seed=5)
    ahead.tokens.append(4)  # token 6 is still on its way
    sampler = Sampler(VOCAB, {})
    logits = torch.tensor([model(full.tokens.tolist())])
    (late,) = sampler.start(head_of(logits), [segment_of(full)]).outcomes()
    segment = segment_of(ahead)
    segment.start += 1
    (early,) = sampler.start(head_of(logits), [segment]).outcomes()
    assert early.tokens == late.tokens


@pytest.mark.parametrize("k", [0, 3, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_logprobs_are_of_the_unmodified_logits(k: int, temperature: float) -> None:
    params = SamplingParams(logprobs=k, temperature=temperature, top_k=2, logit_bias={2: 4.0}, repetition_penalty=2.0)
    row = toy_model(1)([9])
    (out,) = sample([row], params)
    assert out.logprobs is not None
    check_logprob(out.logprobs[0], out.tokens[0], log_softmax(row), k)


def check_logprob(got: TokenLogprob, token: int, expected: list[float], k: int) -> None:
    best = sorted((t for t in range(len(expected)) if expected[t] > -math.inf), key=lambda t: (-expected[t], t))[:k]
    assert got.token_id == token
    assert got.logprob == pytest.approx(expected[token], abs=1e-5)
    assert [t for t, _ in got.top] == best
    assert [value for _, value in got.top] == pytest.approx([expected[t] for t in best], abs=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 3},
        {"top_p": 0.6, "temperature": 2.0},
        {"min_p": 0.3, "logit_bias": {4: 2.0}},
        {"temperature": 0.5},
        {"regex": "(a|b|e)+", "top_k": 2},
        {"regex": "(a|b|e)+"},
        {"presence_penalty": 1.5, "repetition_penalty": 1.7},
    ],
)
def test_processed_logprobs_are_of_what_was_drawn_from(arguments: dict[str, Any]) -> None:
    params = SamplingParams(logprobs=8, logprobs_mode="processed", **arguments)
    row = toy_model(2)([1])
    (out,) = sample([row], params)
    allowed = {1, 2, 5, 7} if params.regex else None
    exact = reference_probabilities(row, make_request(params), (), allowed)
    expected = [math.log(p) if p else -math.inf for p in exact]
    assert out.logprobs is not None
    check_logprob(out.logprobs[0], out.tokens[0], expected, 8)


def test_processed_logprobs_of_greedy_requests_know_no_temperature() -> None:
    row = [0.0, 1.0, 3.0, 2.0]
    plain = SamplingParams(temperature=0.0, logprobs=4, logprobs_mode="processed")
    biased = SamplingParams(temperature=0.0, logprobs=4, logprobs_mode="processed", logit_bias={0: 5.0})
    a, b = sample([row, row], plain, biased)
    assert a.logprobs is not None
    assert b.logprobs is not None
    check_logprob(a.logprobs[0], 2, log_softmax(row), 4)
    check_logprob(b.logprobs[0], 0, log_softmax([5.0, 1.0, 3.0, 2.0]), 4)


def test_logprobs_of_drafted_tokens_are_those_of_plain_decoding() -> None:
    """One entry per emitted token, of the row that emitted it, in a batch where others ask for none."""
    model = toy_model(7)
    params = SamplingParams(logprobs=2, temperature=0.0)
    request = make_request(params)
    text, plain = request.tokens.tolist(), []
    for _ in range(3):
        row = model(text)
        plain.append(row.index(max(row)))
        text.append(plain[-1])
    side = (plain[0] + 1) % VOCAB
    draft = Draft((side, plain[0], plain[1], side), (-1, -1, 1, 2))
    segments = [segment_of(make_request(GREEDY)), segment_of(request, draft)]
    quiet, out = run_step(model, Sampler(VOCAB, {}), segments)
    assert quiet.logprobs is None
    assert out.tokens == plain
    assert out.nodes == [1, 2]
    assert out.logprobs is not None
    for i, entry in enumerate(out.logprobs):
        check_logprob(entry, plain[i], log_softmax(model([1, 2, *plain[:i]])), 2)


def test_prompt_logprobs_are_of_the_tokens_that_followed() -> None:
    model, prompt = toy_model(4), [3, 1, 4, 1, 5]
    logits = torch.tensor([model(prompt[: i + 1]) for i in range(5)])
    got = prompt_logprobs(logits, prompt[1:], 2)  # nothing follows the last row
    assert len(got) == 4
    for i, entry in enumerate(got):
        check_logprob(entry, prompt[i + 1], log_softmax(model(prompt[: i + 1])), 2)
    assert prompt_logprobs(logits[:0], [], 2) == []
    halves = prompt_logprobs(logits[:2], prompt[1:3], 2) + prompt_logprobs(logits[2:], prompt[3:], 2)
    assert halves == got


BAD_PARAMS = [GREEDY, SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", BAD_PARAMS)
def test_logits_that_are_not_finite_fail_their_request_only(bad: float, params: SamplingParams) -> None:
    rows = [[0.0, 1.0, 4.0, 2.0], [0.0, 1.0, bad, 2.0], [0.0, 9.0, 4.0, 2.0]]
    first, broken, last = sample(rows, GREEDY, params, GREEDY)
    assert (first.tokens, last.tokens) == ([2], [1])
    assert broken.tokens == []
    assert isinstance(broken.error, StepError)
    assert broken.error.message == "the model's logits hold NaN or infinity at output position 0"


def test_a_broken_row_off_the_accepted_path_harms_nobody() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 3] = logits[2, 5] = 1.0
    logits[1] = math.nan
    segment = segment_of(make_request(GREEDY), Draft((2, 3, 5), (-1, -1, 1)))
    (out,) = Sampler(VOCAB, {}).start(head_of(logits), [segment]).outcomes()
    assert out.error is None
    assert out.tokens == [3, 5, 0]


def test_a_broken_row_on_the_path_keeps_what_came_before() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = 1.0
    logits[1] = math.nan
    params = SamplingParams(temperature=0.0, logprobs=1)
    (out,) = Sampler(VOCAB, {}).start(head_of(logits), [segment_of(make_request(params), Draft.chain([3]))]).outcomes()
    assert (out.tokens, out.nodes) == ([3], [0])
    assert out.logprobs is not None
    assert [entry.token_id for entry in out.logprobs] == [3]
    assert out.error is not None
    assert out.error.message == "the model's logits hold NaN or infinity at output position 1"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_against_min_tokens_is_an_error_that_names_both(temperature: float) -> None:
    params = SamplingParams(regex="a", min_tokens=4, temperature=temperature)
    request = make_request(params)
    assert request.matcher is not None
    request.matcher.accept(1)
    request.tokens.append(1)
    (out,) = run_step(toy_model(), Sampler(VOCAB, {}), [segment_of(request)])
    assert isinstance(out.error, RequestError)
    assert out.error.message == "the grammar allows only end tokens at output position 1, which min_tokens=4 forbids"
    assert out.error.hint == "lower min_tokens, or let the grammar go on for longer"
    assert out.error.param == "min_tokens"


def test_a_grammar_that_allows_nothing_is_an_error() -> None:
    (out,) = run_step(toy_model(), Sampler(VOCAB, {}), [segment_of(make_request(SamplingParams(regex="z")))])
    assert out.error is not None
    assert out.error.message == "the grammar allows no token of this vocabulary at output position 0"


def test_a_mask_wins_over_bias_and_sampling() -> None:
    params = SamplingParams(regex="(a|b)+", logit_bias={3: 100.0, 1: -100.0, 2: -100.0})
    for seed in range(20):
        (out,) = run_step(toy_model(seed), Sampler(VOCAB, {}), [segment_of(make_request(params, seed=seed))])
        assert out.tokens[0] in (1, 2, 5)


class Processor:
    """Raises, or forbids everything, as its arguments say."""

    def validate(self, arguments: dict[str, Any]) -> None:
        assert arguments

    def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
        if rows[0].arguments["do"] == "raise":
            raise KeyError("oops")
        if rows[0].arguments["do"] == "refuse":
            raise RequestError("no such style", param="style")
        logits.fill_(-math.inf)


def test_a_processor_that_raises_fails_its_own_requests_only() -> None:
    params = [SamplingParams(logits_processors={"odd": {"do": do}}) for do in ("raise", "refuse", "forbid")]
    rows = [[0.0, 1.0, 4.0, 2.0]] * 4
    raised, refused, forbidden, fine = sample(rows, *params, GREEDY, processors={"odd": Processor()})
    assert isinstance(raised.error, PluginError)
    assert raised.error.message == "logits processor 'odd' failed: KeyError('oops')"
    assert refused.error is not None
    assert refused.error.message == "no such style"
    assert forbidden.error is not None
    expected = "no token has a finite score at output position 0; logits processors in use: odd"
    assert forbidden.error.message == expected
    assert fine.tokens == [2]


def test_processors_run_in_the_configured_order() -> None:
    calls = []

    class Noting(Processor):
        def __init__(self, name: str) -> None:
            self.name = name

        def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
            calls.append((self.name, [row.output for row in rows]))

    params = SamplingParams(logits_processors={"b": {}, "a": {}})
    segment = segment_of(make_request(params), Draft.chain([4, 6]))
    run_step(toy_model(), Sampler(VOCAB, {"a": Noting("a"), "b": Noting("b"), "c": Noting("c")}), [segment])
    assert calls == [("a", [[], [4], [4, 6]]), ("b", [[], [4], [4, 6]])]
