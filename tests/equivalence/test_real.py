"""The real models write what transformers writes: about twenty prompts always, the full matrix in the slow suite."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import real_path

from equivalence import harness
from equivalence.harness import Reference, assert_same, greedy, pairwise
from phloem.plugins.model._source import open_source
from phloem.tokenizer import Tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]
COUNT = 12
engine = functools.partial(harness.engine, quant="none")  # weights as the reference has them
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))  # one where several workers share the machine
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Summarise: the cat sat on the mat, then it left.",
    "What is 17 + 25?",
)
LONG = "The sugar a leaf makes travels down the stem, and the water comes up from the root to meet the light. " * 30


class Real:
    """A real model's reference, tokenizer and prompts."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self.reference = Reference(model, cached=True)
        torch.set_num_threads(THREADS)
        tokenizer = Tokenizer(open_source(real_path(name)).tokenizer())
        chat = name == "smollm2-135m"  # the small Gemma is a base model, without a chat template
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        short = [tokenizer.chat(a) if chat else tokenizer.encode(q) for a, q in zip(asked, QUESTIONS, strict=True)]
        self.long = tokenizer.encode(LONG)
        # around the window of Gemma 3 (512) as well
        self.prompts = [*short, *(self.long[:length] for length in (511, 512, 513))]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def real(request: pytest.FixtureRequest, hf_model: Callable[[str], Any]) -> Real:
    return Real(request.param, hf_model(request.param))


def check(real: Real, prompts: list[list[int]], *, drafter: str | None = None, **sections: Any) -> dict[str, Any]:
    """Cold and warm runs equal the reference, and the warm one was warm. Returns the engine's stats."""
    texts = [[*prompt, *real.reference.greedy(prompt, COUNT)[0]] for prompt in prompts] if drafter else []
    page = sections.get("cache", {}).get("page_size", 1)
    shares = sections.get("cache", {}).get("use", "radix") != "chunk"
    roomy = "tokens" not in sections.get("cache", {})
    sections["engine"] = {"threads": THREADS, **sections.get("engine", {})}
    with engine(real.name, drafter=drafter, texts=texts, **sections) as running:
        for warm in (False, True):
            for prompt, result in zip(prompts, running.generate(prompts, greedy(COUNT)), strict=True):
                expected = real.reference.greedy(prompt, COUNT, guess=result.token_ids)
                assert_same(result.token_ids, *expected, f"{real.name}, {len(prompt)} tokens, warm={warm}")
                if warm and roomy:
                    assert result.usage.cached_tokens == ((len(prompt) - 1) // page * page if shares else 0)
        running.check()
        return dict(running.stats())


# Loading Gemma's vocabulary takes most of a test's time; the full matrix has it in all of them.
smollm_always = pytest.mark.parametrize(
    "real", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)], indirect=True
)


def test_cold_and_warm(real: Real) -> None:
    """what-breaks 16: state is wrong at the edge of a window."""
    check(real, real.prompts)


@smollm_always
def test_small_chunks_pages_and_right_drafts(real: Real) -> None:
    stats = check(real, real.prompts[:4], drafter="Right", cache={"page_size": 16}, schedule={"chunk": 16})
    assert stats["accepted_tokens"] > 0


@pytest.mark.slow
def test_retraction_and_wrong_drafts(real: Real) -> None:
    sections = {"cache": {"use": "radix", "tokens": 128}, "schedule": {"chunk": 32}}  # less than a window of Gemma
    stats = check(real, real.prompts[: len(QUESTIONS)], drafter="Wrong", **sections)
    assert stats["retractions"] > 0


@smollm_always
def test_transformers_plugin(real: Real) -> None:
    check(real, [*real.prompts[:2], real.prompts[-1]], model={"use": "transformers"})


AXES = (
    ["native", "transformers"],
    ["radix", "chunk", "swa"],
    [1, 16],
    [1, 16, 512],
    [None, "Right", "Wrong", "Tree"],
    ["off", "on"],
    [1, 12],
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cache", "page", "chunk", "drafter", "overlap", "batch"), pairwise(*AXES))
def test_matrix(
    real: Real, model: str, cache: str, page: int, chunk: int, drafter: str | None, overlap: str, batch: int
) -> None:
    prompts = real.prompts if chunk > 1 else real.prompts[: len(QUESTIONS)]  # one token at a time is for the short ones
    check(
        real,
        prompts,
        drafter=drafter,
        model={"use": model},
        cache={"use": cache, "page_size": page},
        schedule={"chunk": chunk, "max_running": batch},
        engine={"overlap": overlap},
    )


@pytest.mark.slow
def test_prompt_logprobs_cold_warm_and_chunked(real: Real) -> None:
    prompts = [real.prompts[0], real.long[:300]]
    scored = []
    for chunk in (16, 512):
        with engine(real.name, schedule={"chunk": chunk}, engine={"threads": THREADS}) as running:
            for _ in range(2):
                results = running.generate(prompts, greedy(1, prompt_logprobs=0))
                scored.append([[e.logprob for e in r.prompt_logprobs[1:]] for r in results])
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            logits = real.reference.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
            truth = [logits[at, token].item() for at, token in enumerate(prompt[1:])]
            for run in scored:
                assert run[i] == pytest.approx(truth, abs=2e-3)


@pytest.mark.slow
def test_long_prompts_across_windows(real: Real) -> None:
    with engine(real.name) as running:
        long = running.tokenizer.encode(LONG * 5)
    lengths = [1023, 1024, 1025, 3000]
    for chunk, page in itertools.product((512, 100), (1, 16)):
        check(real, [long[:n] for n in lengths], cache={"page_size": page, "tokens": 8192}, schedule={"chunk": chunk})


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
def test_swa_across_windows(real: Real, page: int) -> None:
    """Prompts around one and two windows, and one of six, with few window slots: cold, warm, and continued."""
    with engine(real.name) as running:
        long = running.tokenizer.encode(LONG * 5)
    prompts = [[5 + i, *long[: length - 1]] for i, length in enumerate((511, 512, 513, 1023, 1024, 1025, 3000))]
    sections: dict[str, Any] = {
        "cache": {"use": "swa", "page_size": page, "tokens": 16384, "window_every": 16384},
        "schedule": {"max_running": 2, "max_tokens_per_step": 512, "chunk": 256},
        "engine": {"threads": THREADS},
    }
    with engine(real.name, **sections) as running:
        for prompt in prompts:
            truth = real.reference.greedy(prompt, COUNT)
            cold = running.generate(prompt, greedy(COUNT))
            warm = running.generate(prompt, greedy(COUNT))
            for result in (cold, warm):
                assert_same(result.token_ids, *truth, f"{real.name}, {len(prompt)} tokens")
            # Not how much was found: with few slots only the end of the answer is promised, and the turn begins there.
            turn = [*prompt, *cold.token_ids, 5, 6]
            result = running.generate(turn, greedy(COUNT))
            assert_same(result.token_ids, *real.reference.greedy(turn, COUNT), f"{real.name}, a turn of {len(turn)}")
            assert result.usage.cached_tokens == (len(turn) - 3) // page * page
        groups = running.stats()["groups"]
        if real.name == "gemma3-270m":
            full, window = groups
            assert window["total"] < full["total"] // 4
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])


@pytest.mark.slow
def test_what_comes_back_across_windows(real: Real, tmp_path: Path) -> None:
    """Prompts around one and two windows, and one of six, from host memory, and from the disk after a restart."""
    with engine(real.name) as running:
        long = running.tokenizer.encode(LONG * 5)
    prompts = [[5 + i, *long[: length - 1]] for i, length in enumerate((511, 512, 513, 1023, 1024, 1025, 3000))]
    tiers = {"host": {"size": "1GiB"}, "disk": {"path": str(tmp_path), "size": "1GiB"}}
    for life, runs in enumerate((2, 1)):
        with engine(real.name, cache={"tokens": 8192, **tiers}, engine={"threads": THREADS}) as running:
            for again in range(runs):
                for prompt in prompts:
                    result = running.generate(prompt, greedy(COUNT))
                    truth = real.reference.greedy(prompt, COUNT, guess=result.token_ids)
                    assert_same(result.token_ids, *truth, f"{real.name}, {len(prompt)} tokens, life {life}")
                    blocks = min(len(prompt) // 64 * 64, len(prompt) - 1)
                    assert result.usage.cached_tokens == (blocks if life or again else 0)
                running.invoke(lambda core: core.ledger.cache.reset()).result()
            stats = running.stats()
            assert stats["tiers"]["loads"] == len(prompts)
            assert (stats["tiers"]["disk"]["read"] > 0) == (life > 0)
            running.check()
