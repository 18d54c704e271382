"""Feature pairs on a tiny model: logprobs, seeds, aborts, stops, namespaces and failures, with everything else on."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equivalence.harness import assert_same, engine, greedy, prompts, tiny_reference
from phloem import Engine, SamplingParams
from phloem.errors import ConfigError, ContextError, PhloemError, RequestError
from phloem.messages import GenerateCall
from phloem.results import Result

PROMPTS = prompts(6)
FAULTY = Path(__file__).with_name("faulty_plugins.py")
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def llama(tiny_model: Tiny) -> Path:
    return tiny_model("llama")


@torch.inference_mode()
def reference_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[len - 1, vocab] log-softmax after every token."""
    model = tiny_reference(folder).model
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(("chunk", "page"), [(1, 4), (16, 1), (512, 4)])
def test_prompt_and_output_logprobs_equal_transformers_cold_and_warm(llama: Path, chunk: int, page: int) -> None:
    """what-breaks 45: logprobs and chunks (or retraction)."""
    params = greedy(6, logprobs=3, prompt_logprobs=2)
    with engine(llama, schedule={"chunk": chunk}, cache={"page_size": page}) as running:
        for _ in range(2):
            for prompt, result in zip(PROMPTS, running.generate(PROMPTS, params), strict=True):
                truth = reference_logprobs(llama, [*prompt, *result.token_ids])
                scored = result.prompt_logprobs
                assert scored is not None
                assert scored[0] is None
                assert len(scored) == len(prompt)
                for i, entry in enumerate(scored[1:]):
                    assert entry is not None
                    assert entry.token_id == prompt[i + 1]
                    assert entry.logprob == pytest.approx(truth[i, prompt[i + 1]].item(), abs=1e-3)
                    assert [p for _, p in entry.top] == pytest.approx(truth[i].topk(2).values.tolist(), abs=1e-3)
                assert result.usage.cached_tokens == 0  # a request for prompt logprobs recomputes its prompt
                assert result.logprobs is not None
                for i, entry in enumerate(result.logprobs):
                    at = len(prompt) - 1 + i
                    assert entry.logprob == pytest.approx(truth[at, entry.token_id].item(), abs=1e-3)
                    assert len(entry.top) == 3


@pytest.mark.parametrize("drafter", ["Right", "Wrong", "Tree"])
def test_output_logprobs_are_those_without_drafts(llama: Path, drafter: str) -> None:
    params = greedy(12, logprobs=2)
    with engine(llama) as plain:
        expected = plain.generate(PROMPTS, params)
    texts = [[*p, *r.token_ids] for p, r in zip(PROMPTS, expected, strict=True)]
    with engine(llama, drafter=drafter, texts=texts) as drafting:
        for mine, theirs in zip(drafting.generate(PROMPTS, params), expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-3))


SEEDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=11, max_tokens=20, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.2, min_p=0.01
)


@pytest.mark.parametrize("params", [SEEDED, PENALISED], ids=["filters", "penalties"])
def test_seeded_output_does_not_depend_on_company_chunks_drafts_overlap_or_retraction(
    llama: Path, params: SamplingParams
) -> None:
    with engine(llama) as alone:
        expected = [alone.generate(prompt, params).token_ids for prompt in PROMPTS]
    texts = [[*p, *tokens] for p, tokens in zip(PROMPTS, expected, strict=True)]
    for sections in (
        {},
        {"schedule": {"chunk": 1}},
        {"engine": {"overlap": "on"}},
        {"cache": {"tokens": 160, "page_size": 4}},
        {"drafter": "Right", "texts": texts},
        {"drafter": "Tree", "texts": texts, "cache": {"page_size": 4}, "engine": {"overlap": "on"}},
    ):
        with engine(llama, **sections) as running:
            got = [result.token_ids for result in running.generate(PROMPTS, params)]
            if "tokens" in sections.get("cache", {}):
                assert running.stats()["retractions"] > 0
        assert got == expected, sections


def test_choices_differ_share_one_prefill_and_repeat(llama: Path) -> None:
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=12, ignore_eos=True)
    with engine(llama) as running:
        first = running.generate(prompt, params)
        assert running.stats()["prefill_tokens"] == len(prompt) + 3  # the last prompt token is run for each choice
        assert len({tuple(output.token_ids) for output in first.outputs}) == 4
        assert first.usage.completion_tokens == 48
        assert [o.token_ids for o in running.generate(prompt, params).outputs] == [o.token_ids for o in first.outputs]


def test_unseeded_sampling_differs_and_an_engine_seed_repeats_it(llama: Path) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with engine(llama) as running:
        assert running.generate(PROMPTS[0], params).token_ids != running.generate(PROMPTS[0], params).token_ids
    runs = []
    for _ in range(2):
        with engine(llama, engine={"seed": 4}) as running:
            runs.append([running.generate(PROMPTS[0], params).token_ids for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_aborts_at_any_point_change_nobody_else_and_return_every_slot(llama: Path, page: int, overlap: str) -> None:
    reference = tiny_reference(llama)
    sections = {"cache": {"page_size": page, "tokens": 320}, "schedule": {"chunk": 8}, "engine": {"overlap": overlap}}
    with engine(llama, **sections) as running:
        doomed = [running.stream(prompt, greedy(40)) for prompt in PROMPTS]
        for i, stream in enumerate(doomed):  # waiting, in prefill, or after some tokens
            for _ in range(i):
                next(stream)
            stream.close()
        for result, prompt in zip(running.generate(PROMPTS, greedy(16)), PROMPTS, strict=True):
            assert_same(result.token_ids, *reference.greedy(prompt, 16))
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])
        assert running.stats()["running"] == running.stats()["waiting"] == 0


@pytest.mark.parametrize("drafter", [None, "Right", "Tree"])
def test_stops_and_limits_are_the_same_with_drafts(llama: Path, drafter: str | None) -> None:
    prompt = PROMPTS[0]
    with engine(llama) as plain:
        full = plain.generate(prompt, greedy(24))
        text = plain.tokenizer.decode(full.token_ids)
        pieces = [plain.tokenizer.decode(full.token_ids[:i]) for i in range(25)]
    with engine(llama, drafter=drafter, texts=[[*prompt, *full.token_ids]]) as running:
        for limit in (1, 2, 3, 7):
            cut = running.generate(prompt, greedy(limit))
            assert (cut.token_ids, cut.finish_reason) == (full.token_ids[:limit], "length")
        stop_token = full.token_ids[9]
        first = full.token_ids.index(stop_token)
        stopped = running.generate(prompt, greedy(24, stop_token_ids=[stop_token]))
        assert stopped.token_ids == full.token_ids[: first + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_token)
        found = re.search(r"[a-zA-Z ]{3}", text[5:])  # whole characters: broken bytes are certain only later
        assert found
        word = found.group()
        at = text.index(word)
        stopped = running.generate(prompt, greedy(24, stop=[word]))
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[:at], "stop", word)
        last = next(i for i, piece in enumerate(pieces) if word in piece)
        assert stopped.token_ids == full.token_ids[:last]
        streamed = "".join(delta.text for delta in running.stream(prompt, greedy(24, stop=[word])))
        assert streamed == text[:at]


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_lookup_drafts_on_a_shared_prefix_with_cancels_leave_the_cache_right(
    llama: Path, page: int, overlap: str
) -> None:
    """what-breaks 14, 42: rejected drafts of cancelled requests must not reach what others share."""
    loop = [7, 8, 9, 10, 11] * 6  # so that looking up finds something, right or wrong
    texts = [[*loop, 20 + i, *loop[: 5 + i]] for i in range(6)]
    reference = tiny_reference(llama)
    known = [[*text, *reference.greedy(text, 24)[0]] for text in texts]
    known = [text if i % 2 else [*text[:-12], *text[-10:]] for i, text in enumerate(known)]  # half with a gap
    sections = {"cache": {"page_size": page}, "engine": {"overlap": overlap}, "schedule": {"max_running": 3}}
    with engine(llama, drafter="Ngram", texts=known, **sections) as running:
        for cancels in (True, False, True, False):
            if cancels:
                streams = [running.stream(text, greedy(30)) for text in texts]
                for i, stream in enumerate(streams):
                    for _ in range(1 + i):
                        next(stream, None)
                for stream in streams:
                    stream.close()
            for text, result in zip(texts, running.generate(texts, greedy(24)), strict=True):
                assert_same(result.token_ids, *reference.greedy(text, 24))
            running.check()
        stats = running.stats()
        assert stats["draft_tokens"] > stats["accepted_tokens"] > 0
        assert stats["cached_tokens"] > 1000


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
@pytest.mark.parametrize(("cache", "page", "chunk"), [("radix", 1, 512), ("radix", 4, 7), ("swa", 1, 7)])
def test_prompts_around_the_window(tiny_model: Tiny, arch: str, cache: str, page: int, chunk: int) -> None:
    """what-breaks 16: one, two and four windows (of 16), a token less and more, cold and over a cached part."""
    text = prompts(1, low=80, high=80)[0]
    lengths = [n + d for n in (16, 32, 64) for d in (-1, 0, 1, 2)]
    reference = tiny_reference(tiny_model(arch))
    sections = {"cache": {"use": cache, "page_size": page}, "schedule": {"chunk": chunk}}
    with engine(tiny_model(arch), **sections) as running:
        for length in lengths:  # each finds the one before it cached
            result = running.generate(text[:length], greedy(6))
            assert_same(result.token_ids, *reference.greedy(text[:length], 6), f"{length} tokens")
        running.flush_cache()
        for result, length in zip(running.generate([text[:n] for n in lengths], greedy(6)), lengths, strict=True):
            assert_same(result.token_ids, *reference.greedy(text[:length], 6), f"{length} tokens together")


def test_a_cached_prefix_of_any_length_changes_no_sample(llama: Path) -> None:
    """what-breaks 2: the sample is the same whatever part of the prompt was cached, to the token and to the page."""
    prompt = PROMPTS[3]
    for page in (1, 4):
        seen = set()
        for length in (0, 1, page, page + 1, 15, 16, 17, len(prompt) - 1, len(prompt)):
            with engine(llama, cache={"page_size": page}) as running:
                if length:
                    running.generate(prompt[:length], greedy(1))
                result = running.generate(prompt, SEEDED)
                assert result.usage.cached_tokens == min(length, len(prompt) - 1) // page * page
                seen.add(tuple(result.token_ids))
        assert len(seen) == 1


def test_prompts_shorter_than_a_page(llama: Path) -> None:
    """what-breaks 5: nothing to share, nothing lost; the output grows over page ends."""
    with engine(llama, cache={"page_size": 8, "tokens": 64}) as running:
        for length in (1, 2, 7, 8, 9, 1):
            prompt = PROMPTS[3][:length]
            result = running.generate(prompt, greedy(12))
            assert_same(result.token_ids, *tiny_reference(llama).greedy(prompt, 12))


@pytest.mark.parametrize("chunk", [32, 512])
def test_a_shared_prefix_is_computed_once_however_its_calls_arrive(llama: Path, chunk: int) -> None:
    """Prompt tokens run are the minimum: the prefix once, and each call's own."""
    prefix = prompts(1, low=120, high=120)[0]
    texts = [[*prefix, 10 + i, 300, 301, 302] for i in range(24)]
    least = len(prefix) + 24 * 4
    with engine(llama, schedule={"chunk": chunk, "max_running": 8}) as running:
        running.generate(texts, greedy(3))
        assert running.stats()["prefill_tokens"] == least
        running.flush_cache()

        async def trickle() -> None:
            calls = []
            for text in texts:
                calls.append(asyncio.ensure_future(running.agenerate(text, greedy(3))))
                await asyncio.sleep(0.002)
            await asyncio.gather(*calls)

        asyncio.run(trickle())
        assert running.stats()["prefill_tokens"] == 2 * least


def test_bad_drafters_are_switched_off_and_harm_nothing(llama: Path) -> None:
    reference = tiny_reference(llama)
    for drafter in ("Raises", "Nonsense"):
        truth = [reference.greedy(prompt, 20) for prompt in PROMPTS]
        texts = [[*p, *tokens] for p, (tokens, _) in zip(PROMPTS, truth, strict=True)]
        with engine(llama, drafter=drafter, texts=texts) as running:
            for result, expected in zip(running.generate(PROMPTS, greedy(20)), truth, strict=True):
                assert_same(result.token_ids, *expected)
            assert sum(running.stats()["drafter_failures"].values()) == len(PROMPTS)


def test_namespaces_never_share(llama: Path) -> None:
    """what-breaks 3"""
    prompt = [*PROMPTS[1], 5, 6, 7]
    with engine(llama) as running:
        seen = [running.generate(prompt, greedy(2), salt=salt).usage.cached_tokens for salt in (None, "a", "b", "a")]
        assert seen == [0, 0, 0, len(prompt) - 1]


@pytest.mark.parametrize("page", [1, 4])
def test_a_conversation_extends_its_own_output(llama: Path, page: int) -> None:
    """Turn by turn, only what is new is computed: the new tokens and the last sampled one."""
    text, known = PROMPTS[1], 1
    with engine(llama, cache={"page_size": page}) as running:
        for turn in range(4):
            result = running.generate(text, greedy(9))
            assert result.usage.cached_tokens == (known - 1) // page * page
            known = len(text) + 9
            text = [*text, *result.token_ids, 50 + turn, 60, 70]


def test_refusals_name_the_parameter(llama: Path) -> None:
    """what-breaks 20: the last request cannot be retracted."""
    with engine(llama, cache={"tokens": 256}) as running:
        cases: list[tuple[list[int], SamplingParams, str, str]] = [
            ([], greedy(1), "prompt", "empty"),
            ([5, 512], greedy(1), "prompt", "outside the vocabulary of 512"),
            ([5] * 256, SamplingParams(), "prompt", "the KV pool holds 256 tokens"),
            ([5] * 200, greedy(57), "max_tokens", "200 tokens + max_tokens 57 = 257 exceeds the limit of 256"),
            ([5], greedy(1, regex="a+"), "regex", "without a grammar backend"),
            ([5], greedy(1, logits_processors={"nope": {}}), "logits_processors", "unknown logits processor 'nope'"),
            ([5], greedy(1, stop_token_ids=[9999]), "stop_token_ids", "outside the vocabulary"),
        ]
        for prompt, params, name, words in cases:
            with pytest.raises(RequestError, match=words.replace("+", r"\+")) as caught:
                running.generate(prompt, params)
            assert caught.value.param == name
        with pytest.raises(ContextError):
            running.generate([5] * 300, SamplingParams())
        with pytest.raises(RequestError, match="adapter 'x' is not available"):
            running.generate([5], greedy(1), adapter="x")
        with pytest.raises(RequestError, match="schedule policy 'lpm' ignores it"):
            running.generate([5], greedy(1), priority=3)
        assert running.generate([5] * 200, SamplingParams(temperature=0.0, ignore_eos=True)).finish_reason == "length"


def test_every_door_refuses_what_is_no_prompt(llama: Path) -> None:
    with engine(llama, cache={"tokens": 256}) as running:
        cases: list[tuple[Any, str]] = [
            (None, "a string or a list of token ids, got NoneType"),
            ([5, "a"], "a string or a list of token ids, got (int|list)|the token ids of a prompt are integers"),
            ([5.0], "the token ids of a prompt are integers, got float"),
            ([True], "the token ids of a prompt are integers, got bool"),
            ([], "the prompt is empty"),
        ]
        for prompt, words in cases:
            for door in (running.generate, lambda *given: list(running.stream(*given))):
                with pytest.raises(RequestError, match=words):
                    door(prompt, greedy(1))
        with pytest.raises(RequestError, match="the token ids of a prompt are integers, got bool"):
            running.generate([[True]], greedy(1))
        with pytest.raises(RequestError, match=r"params must be SamplingParams, got \[SamplingParams"):
            running.generate([5], [greedy(1)])  # type: ignore[call-overload]
        with pytest.raises(RequestError, match="1 params for 2 prompts"):
            running.generate([[5], [6]], [greedy(1)])
        assert [len(own.token_ids) for own in running.generate([[5], [6]], [greedy(1), greedy(2)])] == [1, 2]
        for name, value in (("priority", "high"), ("salt", 5)):
            with pytest.raises(RequestError, match=f"{name} has the wrong type, got {value!r}"):
                running.generate([5], greedy(1), **{name: value})
        ids = [np.int64(5), np.int32(6)]
        assert running.generate(ids, greedy(3)).token_ids == running.generate([5, 6], greedy(3)).token_ids
    with pytest.raises(ConfigError, match="the model is given twice: 'a' and"):
        Engine("a", model={"path": "b"})


def test_a_step_that_fails_fails_its_requests_only(llama: Path) -> None:
    with engine(llama, attention={"use": f"{FAULTY}:FailsOnce", "at": 3}) as running:
        with pytest.raises(PhloemError, match="RuntimeError: this kernel broke"):
            running.generate(PROMPTS[0], greedy(8))
        running.check()
        expected = tiny_reference(llama).greedy(PROMPTS[0], 8)
        assert_same(running.generate(PROMPTS[0], greedy(8)).token_ids, *expected)


def test_a_policy_that_raises_fails_the_waiting_only(llama: Path) -> None:
    with engine(llama, schedule={"use": f"{FAULTY}:Raises"}) as running:
        stream = running.stream(PROMPTS[0], greedy(30))
        first = next(stream)
        with pytest.raises(PhloemError, match="the schedule policy failed: ValueError"):
            running.generate(PROMPTS[1], greedy(4))
        tokens = [*first.token_ids, *(t for delta in stream for t in delta.token_ids)]
        assert_same(tokens, *tiny_reference(llama).greedy(PROMPTS[0], 30))


def test_a_policy_that_raises_takes_the_running_choices_of_a_failed_call_out_of_the_step(llama: Path) -> None:
    with engine(llama, schedule={"use": f"{FAULTY}:Raises", "good": 2}) as running:
        stream = running.stream(PROMPTS[0], greedy(30))
        first = next(stream)
        with pytest.raises(PhloemError, match="the schedule policy failed: ValueError"):
            running.generate(PROMPTS[1], greedy(20, n=3))  # one choice runs, two wait for its prefix
        tokens = [*first.token_ids, *(t for delta in stream for t in delta.token_ids)]
        assert_same(tokens, *tiny_reference(llama).greedy(PROMPTS[0], 30))


def test_planning_that_fails_fails_the_calls_and_not_the_engine(llama: Path) -> None:
    sections = {"schedule": {"use": f"{FAULTY}:Raises", "good": 100}, "cache": {"tokens": 120}}
    with engine(llama, **sections) as running:
        with pytest.raises(PhloemError, match="planning failed: KeyError: 'no victim today'"):
            running.generate(PROMPTS[:4], greedy(40))
        assert_same(running.generate(PROMPTS[0], greedy(8)).token_ids, *tiny_reference(llama).greedy(PROMPTS[0], 8))
        assert running.stats()["running"] == running.stats()["waiting"] == 0


def test_a_request_that_ends_while_the_next_step_runs_touches_no_other_row(llama: Path) -> None:
    """Overlap launches a step before it knows that a request has ended; the row of such a one may be another's."""
    many = prompts(12)
    truth = [tiny_reference(llama).greedy(prompt, 40)[0] for prompt in many]
    stops = [[] if i == 3 else [tokens[4]] for i, tokens in enumerate(truth)]  # the fourth has the last of four rows
    sections = {"engine": {"overlap": "on"}, "schedule": {"max_running": 4}, "attention": {"use": f"{FAULTY}:Slow"}}
    with engine(llama, **sections) as running:

        async def run() -> list[Result]:
            calls = zip(many, stops, strict=True)
            return await asyncio.gather(*(running.agenerate(p, greedy(40, stop_token_ids=s)) for p, s in calls))

        for result, tokens, stop in zip(asyncio.run(run()), truth, stops, strict=True):
            assert result.token_ids == (tokens[: tokens.index(stop[0]) + 1] if stop else tokens)


def test_a_kernel_that_cannot_is_refused_before_it_computes_something_else(tiny_model: Tiny, llama: Path) -> None:
    plain = {"use": f"{FAULTY}:Plain"}
    with pytest.raises(ConfigError, match=r"faulty_plugins\.py:Plain' has no window, and gemma3_text has layers with"):
        engine(tiny_model("gemma3"), attention=plain)
    with pytest.raises(ConfigError, match=r"has no tree_mask, and spec.*:Right proposes drafts"):
        engine(llama, drafter="Right", attention=plain)
    with pytest.raises(ConfigError, match=r"cache: cache.page_size: 8, and attention .*:Plain' takes pages of 1 or 4"):
        engine(llama, attention=plain, cache={"page_size": 8})
    with engine(llama, drafter="Right", attention={"prefill": "torch", "decode": plain}) as running:
        assert running.generate(PROMPTS[0], greedy(2)).finish_reason == "length"
    with engine(llama, attention=plain) as running:
        assert running.generate(PROMPTS[0], greedy(2)).finish_reason == "length"


def test_an_observer_that_raises_harms_nobody(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(llama, observers=[{"use": f"{FAULTY}:BadObserver"}]) as running:
        for prompt, result in zip(PROMPTS, running.generate(PROMPTS, greedy(12)), strict=True):
            assert_same(result.token_ids, *tiny_reference(llama).greedy(prompt, 12))
    assert "is switched off" in caplog.text


def test_many_threads_share_one_engine(llama: Path) -> None:
    reference = tiny_reference(llama)
    wrong: list[str] = []
    with engine(llama, schedule={"max_running": 4}) as running:

        def work(prompt: list[int]) -> None:
            try:
                assert_same(running.generate(prompt, greedy(10)).token_ids, *reference.greedy(prompt, 10))
            except AssertionError as error:
                wrong.append(str(error))

        for prompt in PROMPTS:
            reference.greedy(prompt, 10)
        threads = [threading.Thread(target=work, args=(prompt,)) for prompt in PROMPTS * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_closed_engine_says_so(llama: Path) -> None:
    running: Engine = engine(llama)
    running.close()
    running.close()
    with pytest.raises(PhloemError, match="closed"):
        running.generate([5], greedy(1))
    with pytest.raises(PhloemError, match="closed"):
        running.stats()


@pytest.mark.asyncio
async def test_a_callers_id_names_one_call_at_a_time(llama: Path) -> None:
    """A second call of that name is refused and the first goes on; once it is left, the name is free at once."""

    def call(count: int) -> GenerateCall:
        return GenerateCall(call_id="a", prompt=PROMPTS[0], params=greedy(count))

    with engine(llama) as running:
        service = running.service()
        first = service.submit(call(300))
        await anext(first)
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            await anext(running.service().submit(call(4)))
        assert (await anext(first)).call_id == "a"
        await first.aclose()
        events = [event async for event in service.submit(call(4))]
        assert [token for event in events for token in event.token_ids] == tiny_reference(llama).greedy(PROMPTS[0], 4)[
            0
        ]
        assert events[-1].finish_reason == "length"
        second = service.submit(call(300))
        await anext(second)
        assert await service.abort("a")
        assert not await service.abort("a")
        assert [event.finish_reason async for event in second][-1] == "abort"


async def collect(running: Engine, prompt: list[int]) -> list[int]:
    return [token async for delta in running.astream(prompt, greedy(10)) for token in delta.token_ids]


@pytest.mark.asyncio
async def test_async_forms_equal_the_sync_ones(llama: Path) -> None:
    with engine(llama) as running:
        results = await running.agenerate(PROMPTS, greedy(10))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert_same(result.token_ids, *tiny_reference(llama).greedy(prompt, 10))
        assert await collect(running, PROMPTS[0]) == results[0].token_ids
