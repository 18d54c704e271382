"""Scoring as one tree equals scoring each prompt + choice by its prompt logprobs, whatever else goes on."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import assert_same, engine, greedy, pairwise, prompts, tiny_reference
from equivalence.test_steps import Stepper
from phloem import Engine, SamplingParams
from phloem.errors import AbortedError, ContextError, PhloemError, RequestError
from phloem.messages import Event, GenerateCall
from phloem.plugins.model.native import NativeModel

Tiny = Callable[[str], Path]
CLOSE = 1e-4
PROMPT = prompts(1, low=30, high=30)[0]
OTHERS = prompts(4, seed=9)
SHARED = [[5, 6, 7], [5, 6], [5, 6, 8, 9], [7], [8, 5], [5], [5, 6, 7]]
MANY = [[i, *random.Random(i % 8).sample(range(4, 500), i % 6)] for i in range(100, 164)]


@pytest.fixture(scope="module")
def llama(tiny_model: Tiny) -> Path:
    return tiny_model("llama")


@torch.inference_mode()
def reference(folder: Path, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> list[list[float]]:
    """By transformers, each choice from a forward pass of its own."""
    model, scores = tiny_reference(folder).model, []
    for choice in choices:
        logits = model(torch.tensor([[*prompt, *choice]])).logits[0].float().log_softmax(-1)
        scores.append([logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(choice)])
    return scores


def direct(running: Engine, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> list[list[float]]:
    """By prompt logprobs of the joined tokens, one call per choice."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    results = running.generate([[*prompt, *choice] for choice in choices], params)
    return [[one.logprob for one in (r.prompt_logprobs or [])[len(prompt) :] if one] for r in results]


def assert_close(got: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    assert [len(row) for row in got] == [len(row) for row in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)


Scores = list[list[float]]


def score(running: Engine, prompt: list[int], choices: Any, **call: Any) -> tuple[Scores, dict[str, int]]:
    """The scores, and what they add to the counters."""
    before = running.stats()
    got = running.score(prompt, choices, **call)
    after = running.stats()
    return got, {name: after[name] - before[name] for name in before if isinstance(before[name], int)}


KINDS = {"shared": SHARED, "many": MANY, "short": [[i] for i in range(64)], "one": [[9, 8, 7, 6]]}


@pytest.mark.parametrize(("kind", "page", "overlap"), pairwise(list(KINDS), [1, 4], ["off", "on"]))
def test_one_pass_equals_prompt_logprobs(llama: Path, kind: str, page: int, overlap: str) -> None:
    choices = KINDS[kind]
    with engine(llama, cache={"page_size": page}, engine={"overlap": overlap}) as running:
        for _ in range(2):  # cold and warm
            got, counted = score(running, PROMPT, choices)
            assert counted["steps"] == 1
            assert counted["draft_tokens"] == counted["decode_tokens"] == 0
            inner = {tuple(c[:i]) for c in choices for i in range(1, len(c))}
            assert counted["scored_tokens"] == len(inner)
            assert counted["forward_tokens"] == counted["prefill_tokens"] + len(inner)
            assert_close(got, direct(running, PROMPT, choices))
        assert_close(got, reference(llama, PROMPT, choices))
        assert counted["prefill_tokens"] == 1 if page == 1 else counted["prefill_tokens"] <= page


def test_nothing_of_the_choices_stays_but_the_prompt_does(llama: Path) -> None:
    with engine(llama) as running:
        running.score(PROMPT, SHARED)
        (group,) = running.stats()["groups"]
        assert group["evictable"] == len(PROMPT)
        assert group["free"] == group["total"] - len(PROMPT)
        assert running.generate([*PROMPT, 5], greedy(1)).usage.cached_tokens == len(PROMPT)


@pytest.mark.parametrize(("chunk", "page"), [(1, 4), (7, 1), (64, 4)])
def test_long_prompts_come_in_chunks(llama: Path, chunk: int, page: int) -> None:
    prompt = prompts(1, low=100, high=100)[0]
    with engine(llama, schedule={"chunk": chunk}, cache={"page_size": page}) as running:
        assert_close(running.score(prompt, SHARED), reference(llama, prompt, SHARED))
        assert running.stats()["prefill_tokens"] == 100


def test_as_few_passes_as_the_step_needs(llama: Path) -> None:
    limits = {"max_tokens_per_step": 40, "chunk": 16}
    with engine(llama, schedule=limits) as running:
        got, counted = score(running, PROMPT, MANY)
        assert_close(got, reference(llama, PROMPT, MANY))
        assert counted["steps"] <= 2 + -(-counted["scored_tokens"] // 34)
        assert counted["prefill_tokens"] == len(PROMPT) + counted["steps"] - 2
        longest = [[*range(10, 50)], [4]]
        assert_close(running.score(PROMPT, longest), reference(llama, PROMPT, longest))
        with pytest.raises(ContextError) as error:
            running.score(PROMPT, [[*range(10, 51)]])
        assert error.value.param == "score"


@pytest.mark.parametrize("page", [1, 4])
def test_a_tree_larger_than_the_pool_takes_more_passes(llama: Path, page: int) -> None:
    with engine(llama, cache={"tokens": 64, "page_size": page}) as running:
        assert_close(running.score(PROMPT, MANY), reference(llama, PROMPT, MANY))
        with pytest.raises(ContextError, match="score 40"):
            running.score(PROMPT, [[*range(10, 50)]])
        running.flush_cache()
        assert running.stats()["groups"][0]["free"] == 64


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("tokens", [4096, 192])
def test_company(llama: Path, tokens: int, overlap: str) -> None:
    """Beside requests that decode with drafts, in a pool that forces retraction, and beside other scorings."""
    truth = tiny_reference(llama)
    texts = [[*p, *truth.greedy(p, 24)[0]] for p in OTHERS]
    scored = [*OTHERS[:2], PROMPT]
    expected = [reference(llama, prompt, MANY) for prompt in scored]
    sections = {"cache": {"tokens": tokens}, "engine": {"overlap": overlap}, "schedule": {"max_tokens_per_step": 64}}
    with engine(llama, drafter="Tree", texts=texts, **sections) as running:

        async def both() -> None:
            calls = [running.ascore(prompt, MANY) for prompt in scored]
            *scores, generated = await asyncio.gather(*calls, running.agenerate(OTHERS, greedy(24)))
            for got, theirs in zip(scores, expected, strict=True):
                assert_close(got, theirs)
            for prompt, result in zip(OTHERS, generated, strict=True):
                assert_same(result.token_ids, *truth.greedy(prompt, 24))

        asyncio.run(both())


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_beside_constraints_and_prompt_logprobs(llama: Path, overlap: str) -> None:
    """Whose rows of logits lie in the same batch: masked and certain ones, those of prompts, those of trees."""
    pytest.importorskip("llguidance")
    masked = SamplingParams(max_tokens=20, temperature=0, regex="(a|b)[0-9]{3}, (one|two) and the same again")
    owed = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
    sections = {"grammar": {"use": "llguidance"}, "spec": [{"use": "grammar"}], "engine": {"overlap": overlap}}
    with engine(llama, **sections, cache={"tokens": 1024}) as running:
        plain = [running.generate(text, masked, salt="alone") for text in OTHERS]
        told = running.generate(PROMPT, owed, salt="alone")
        expected = running.score(PROMPT, MANY, salt="alone")

        async def together() -> None:
            calls = [running.agenerate(OTHERS, masked), running.agenerate(PROMPT, owed), running.ascore(PROMPT, MANY)]
            got, again, scores = await asyncio.gather(*calls)
            assert [one.token_ids for one in got] == [one.token_ids for one in plain]
            assert again.token_ids == told.token_ids
            rows = [[item.logprob for item in one.prompt_logprobs or [] if item] for one in (again, told)]
            assert_close(rows[:1], rows[1:])
            assert_close(scores, expected)

        asyncio.run(together())
        assert running.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize(("overlap", "page"), [("off", 1), ("on", 4)])
def test_retracted_or_aborted_after_any_step(llama: Path, overlap: str, page: int) -> None:
    """At every chunk of the prompt and between all passes; a retracted one scores only what is left."""
    sections = {"cache": {"page_size": page}, "engine": {"overlap": overlap}}
    bench = Stepper(llama, **sections, schedule={"chunk": 8, "max_tokens_per_step": 16})
    expected = reference(llama, PROMPT, MANY[:24])
    assert bench.core.scheduler.branches
    for kind, steps in itertools.product(("retract", "abort"), range(9)):
        bench.events.clear()
        bench.submit("s", PROMPT, SamplingParams(), score=MANY[:24], salt=f"{kind}{steps}")
        bench.submit("other", OTHERS[0], greedy(8))
        for _ in range(steps):
            bench.step()
        running = [r for r in bench.core.scheduler.running if r.scoring is not None]
        if kind == "abort":
            assert bench.core.abort_now("s")
        elif running:
            bench.core.scheduler.retract(running[0])
        bench.finish()
        bench.step()  # tells of an abort
        assert_same(bench.tokens("other"), *tiny_reference(llama).greedy(OTHERS[0], 8))
        (event,) = bench.of("s")
        if kind == "abort":
            assert (event.finish_reason, event.scores) == ("abort", None)
        else:
            assert event.scores is not None
            assert_close(event.scores, expected)
    assert bench.core.scheduler.retractions > 5
    assert bench.all_free()


def test_a_scoring_that_finds_no_room_beside_others_goes_first(llama: Path) -> None:
    """One continuation fills a whole step, and others decode without end."""
    with engine(llama, schedule={"max_tokens_per_step": 16, "chunk": 8}) as running:
        streams = [running.stream(prompt, greedy(200)) for prompt in OTHERS]
        for stream in streams:
            next(stream)
        choices = [[*range(10, 26)], [5]]
        assert_close(running.score(PROMPT, choices), reference(llama, PROMPT, choices))
        assert running.stats()["running"] == len(streams)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("arch", ["gemma2", "mistral", "qwen2", "gpt2"])
def test_other_models(tiny_model: Tiny, arch: str) -> None:
    """Windows and soft caps, biases, and through the plugin `transformers` positions that are learnt."""
    folder = tiny_model(arch)
    with engine(folder) as running:
        assert_close(running.score(PROMPT, MANY[:20]), reference(folder, PROMPT, MANY[:20]))


@pytest.mark.parametrize("what", ["attention", "model"])
def test_plugins_without_trees_take_chains(llama: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Path(__file__).with_name("faulty_plugins.py")
    attention = {"use": f"{plugins}:Plain"} if what == "attention" else {"use": "torch"}
    if what == "model":
        monkeypatch.setattr(NativeModel, "capabilities", frozenset({"sparse_head"}))
    with engine(llama, spec=[], attention=attention) as running:
        got, counted = score(running, PROMPT, SHARED)
        assert_close(got, reference(llama, PROMPT, SHARED))
        assert counted["steps"] == 2  # 5, 5 6 7 and 5 6 8 9 share what is run; 8 5 does not
        assert counted["prefill_tokens"] == len(PROMPT) + 1
        assert score(running, PROMPT, [[i] for i in range(64)])[1]["steps"] == 1


def test_split_attention(llama: Path) -> None:
    with engine(llama, attention={"prefill": "torch", "decode": "torch"}) as running:
        assert_close(running.score(PROMPT, SHARED), reference(llama, PROMPT, SHARED))


def test_salts_never_share(llama: Path) -> None:
    with engine(llama) as running:
        running.score(PROMPT, SHARED, salt="a")
        assert score(running, PROMPT, SHARED, salt="b")[1]["prefill_tokens"] == len(PROMPT)
        assert score(running, PROMPT, SHARED, salt="a")[1]["prefill_tokens"] == 1


def test_events_of_a_scoring_call(llama: Path) -> None:
    with engine(llama) as running:

        async def submit() -> list[Event]:
            call = GenerateCall(call_id="s", prompt=PROMPT, params=SamplingParams(), score=SHARED)
            return [event async for event in running.service().submit(call)]

        (event,) = asyncio.run(submit())
        assert (event.finish_reason, event.token_ids, event.text) == ("stop", [], "")
        assert event.usage is not None
        assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (len(PROMPT), 0)
        assert event.scores is not None
        stats = running.stats()
        assert stats["requests"] == {"stop": 1}
        assert stats["prompt_tokens"] == len(PROMPT)


def test_texts_are_tokenised_with_the_prompt(llama: Path) -> None:
    with engine(llama) as running:
        text, choices = "The sugar a leaf mak", ["es", "ing it", ""]
        scores = running.score(text, choices)
        whole = [running.tokenizer.encode(text + choice) for choice in choices]
        for tokens, row in zip(whole, scores, strict=True):
            assert_close([row], reference(llama, tokens[: -len(row)], [tokens[-len(row) :]]))


def test_a_scoring_that_the_engine_closes_on_is_an_error(llama: Path) -> None:
    plugins = Path(__file__).with_name("faulty_plugins.py")
    running = engine(llama, attention={"use": f"{plugins}:Slow"}, schedule={"chunk": 1})
    errors: list[Exception] = []

    def work() -> None:
        try:
            running.score(PROMPT * 8, SHARED)
        except PhloemError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not running.stats()["running"]:
        pass
    running.close()
    thread.join()
    assert isinstance(errors[0], AbortedError)


@pytest.mark.parametrize(
    ("choices", "param"),
    [([], "score"), ("a", "choices"), ([[]], "prompt"), ([[600]], "score"), ([[1], "a"], "prompt"), ([1], "prompt")],
)
def test_refusals(llama: Path, choices: Any, param: str) -> None:
    with engine(llama) as running:
        with pytest.raises(RequestError) as error:
            running.score(PROMPT, choices)
        assert error.value.param == param
        with pytest.raises(PhloemError):
            running.score([], [[1]])


def test_the_default_model(smollm2_path: str) -> None:
    with Engine(smollm2_path, cache={"tokens": 2048}, grammar="none", engine={"check": True}) as running:
        prompt = running.tokenizer.encode("Sugar is made in the leaves of a plant. It travels through the")
        words = [" phloem", " xylem", " phlox", " phloem and", " air", " stem", " soil", " sun"]
        choices = [running.tokenizer.encode(word) for word in words]
        assert_close(running.score(prompt, choices), direct(running, prompt, choices))
