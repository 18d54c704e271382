"""The drafters `ngram` and `suffix`, and both together, change no output, whatever they are combined with.

Prompts repeat themselves and each other, so that drafts are often right and often nearly right.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.drafter_rig import COUNT, KINDS, logprobs_of, run_features, run_kind, told
from equivalence.harness import TOYS, assert_same, engine, greedy, pairwise, tiny_reference
from phloem import SamplingParams

SPECS: dict[str, list[dict[str, Any]]] = {
    "ngram": [{"use": "ngram", "min_match": 1, "breadth": 3}],
    "suffix": [{"use": "suffix", "min_match": 1, "factor": 8.0, "breadth": 3}],
    "both": [{"use": "suffix", "min_match": 1}, {"use": "ngram", "min_match": 1}],
    "led": [{"use": "ngram", "min_match": 1}, {"use": "grammar"}, {"use": "suffix", "min_match": 1}],
}


def repetitive(folder: Path, count: int = 6) -> list[list[int]]:
    """Prompts with the model's own continuation of each in the text of another, and of half of them in their own."""
    rng, reference = random.Random(11), tiny_reference(folder)
    made: list[list[int]] = []
    for i in range(count):
        prompt = [rng.randrange(4, 500) for _ in range(rng.randint(4, 30))]
        written, _ = reference.greedy(prompt, COUNT)
        made.append([*prompt, *written, *prompt] if i % 2 else prompt)
    return made


# --- greedy, against transformers


# drafters, cache, page size, chunk, pool, overlap, draft size
AXES = (list(SPECS), ["radix", "chunk", "swa"], [1, 4], [3, 512], [4096, 220], ["off", "on"], ["adaptive", "fixed"])


def run_combination(
    folder: Path, spec: str, cache: str, page: int, chunk: int, pool: int, overlap: str, size: str
) -> dict[str, Any]:
    below = {"use": cache, "page_size": page, "tokens": pool}
    stats = run_features(folder, repetitive(folder), SPECS[spec], below, chunk, overlap, size)
    if size == "fixed":
        assert stats["accepted_tokens"] > 30
    if pool == 220 and (cache == "radix" or (cache == "chunk" and folder.name == "llama")):  # no pool for windows
        assert stats["retractions"] > 0
    return stats


@pytest.mark.parametrize("combination", pairwise(*AXES))
def test_pairs_of_features(tiny_model: Callable[[str], Path], combination: tuple[Any, ...]) -> None:
    """what-breaks 42: drafts change greedy output."""
    run_combination(tiny_model("llama"), *combination)


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
@pytest.mark.parametrize("spec", list(SPECS))
def test_windows(tiny_model: Callable[[str], Path], arch: str, spec: str) -> None:
    for cache, page in (("radix", 1), ("swa", 4)):
        run_combination(tiny_model(arch), spec, cache, page, 16, 4096, "off", "fixed")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("combination", list(itertools.product(*AXES)))
def test_all_combinations(tiny_model: Callable[[str], Path], arch: str, combination: tuple[Any, ...]) -> None:
    run_combination(tiny_model(arch), *combination)


# --- grammars, stop strings, logprobs, streams, several choices: against the same engine without drafters


# drafters, and what requests ask for
ASKED = (list(SPECS), *KINDS)


def run_asked(folder: Path, spec: str, *kind: Any) -> None:
    run_kind(folder, repetitive(folder, 4), SPECS[spec], *kind)


@pytest.mark.parametrize("kind", pairwise(*ASKED))
def test_pairs_of_kinds(tiny_model: Callable[[str], Path], kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model("llama"), *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(itertools.product(*ASKED)))
def test_all_kinds(tiny_model: Callable[[str], Path], kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model("llama"), *kind)


# --- edges: what lies behind an end is never emitted and never billed


def certain(folder: Path, **sections: Any) -> tuple[Any, list[int], list[int]]:
    """An engine whose drafts are always right, a prompt, and what follows."""
    prompt = repetitive(folder)[0]
    truth = tiny_reference(folder).greedy(prompt, 60)[0]
    return engine(folder, drafter="Right", texts=[[*prompt, *truth]], **sections), prompt, truth


@pytest.mark.parametrize("page", [1, 4])
def test_drafts_past_max_tokens(tiny_model: Callable[[str], Path], page: int) -> None:
    running, prompt, truth = certain(tiny_model("llama"), cache={"page_size": page})
    with running:
        for most in range(1, 8):
            before = running.stats()
            result = running.generate(prompt, greedy(most))
            assert result.token_ids == truth[:most]
            assert (result.finish_reason, result.usage.completion_tokens) == ("length", most)
            stats = running.stats()
            assert stats["decode_tokens"] - before["decode_tokens"] == most
            assert stats["draft_tokens"] - before["draft_tokens"] <= most - 1
            running.check()


def test_drafts_past_the_context_limit(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    prompt = repetitive(folder)[0]
    running, prompt, truth = certain(folder, engine={"context_length": len(prompt) + 11})
    with running:
        result = running.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True))
        assert result.token_ids == truth[:11]
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 11)
        running.check()


def test_drafts_past_a_stop_token(tiny_model: Callable[[str], Path]) -> None:
    running, prompt, truth = certain(tiny_model("llama"))
    with running:
        for end in truth[1:7]:
            first = truth.index(end)
            result = running.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[end]))
            assert result.token_ids == truth[: first + 1]
            assert result.finish_reason == "stop"
            assert result.usage.completion_tokens == first + 1
            running.check()


@pytest.mark.parametrize("page", [1, 4])
def test_drafts_past_a_stop_string(tiny_model: Callable[[str], Path], page: int) -> None:
    """what-breaks 49: as without drafts: text, tokens, logprobs and bill."""
    folder = tiny_model("llama")
    running, prompt, truth = certain(folder, cache={"page_size": page})
    with running, engine(folder, spec=[], cache={"page_size": page}) as plain:
        for at in (1, 2, 3, 4, 5, 6, 9):
            stop = running.tokenizer.decode(truth[: at + 1])[-3:]
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop], logprobs=0)
            result, expected = running.generate(prompt, params), plain.generate(prompt, params)
            assert told([result]) == told([expected])
            assert logprobs_of([result]) == pytest.approx(logprobs_of([expected]), abs=1e-3)
            assert stop not in result.text
            running.check()
        assert running.stats()["draft_tokens"] > 0


# --- abort, and drafters that fail


@pytest.mark.parametrize(("steps", "overlap"), [(n, ("off", "on")[n % 2]) for n in range(1, 10)])
def test_abort_between_propose_and_verify(tiny_model: Callable[[str], Path], overlap: str, steps: int) -> None:
    """In the middle of planning, with a draft in the plan, and after the launch: every slot comes back."""
    folder = tiny_model("llama")
    prompts = repetitive(folder, 3)
    truth = [tiny_reference(folder).greedy(prompt, COUNT) for prompt in prompts]
    with engine(folder, spec=SPECS["both"], engine={"overlap": overlap}) as running:
        scheduler, asked, ended = running.core.scheduler, 0, list[str]()
        propose = scheduler.propose

        def abort(wants: Any) -> Any:
            nonlocal asked
            drafts = propose(wants)
            for request, _ in wants:
                asked += 1
                if asked == steps:
                    call = request.call.call_id
                    ended.append(call)
                    running.core.abort(call)  # heard before the next step: with overlap, while this one is under way
            return drafts

        scheduler.propose = abort
        results = running.generate(prompts, greedy(COUNT))
        scheduler.propose = propose
        assert len(ended) == 1
        assert sorted(result.finish_reason for result in results) == ["abort", "length", "length"]
        for result, (tokens, margins) in zip(results, truth, strict=True):
            if result.finish_reason == "length":
                assert_same(result.token_ids, tokens, margins)
            else:
                assert result.token_ids == tokens[: len(result.token_ids)]
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])


FAULTY = """
import time
from phloem.drafts import Draft
from equivalence.toy_drafters import _Toy

class Sleeps(_Toy):
    def propose(self, context, budget):
        time.sleep(3)

class Cycle(_Toy):
    def propose(self, context, budget):
        return Draft((5, 6), (1, 0))

class Many(_Toy):
    def propose(self, context, budget):
        return Draft.chain([5] * (budget + 1))

class Wrong_type(_Toy):
    def propose(self, context, budget):
        return "draft"

class Twins(_Toy):
    def propose(self, context, budget):
        return Draft((5, 5), (-1, -1))
"""


@pytest.mark.parametrize("name", ["Sleeps", "Cycle", "Many", "Wrong_type", "Twins", "Raises", "Nonsense"])
def test_a_bad_drafter_is_switched_off_and_harms_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = tiny_model("llama")
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    bad = {"use": f"{TOYS if name in ('Raises', 'Nonsense') else file}:{name}"}
    prompts = repetitive(folder, 2)
    size = "fixed" if name == "Raises" else "adaptive"  # at its third call, which adaptation may spare a request
    with engine(folder, spec=[bad, *SPECS["ngram"]], engine={"draft_size": size}) as running:
        for result, prompt in zip(running.generate(prompts, greedy(COUNT)), prompts, strict=True):
            assert_same(result.token_ids, *tiny_reference(folder).greedy(prompt, COUNT), name)
        assert list(running.stats()["drafter_failures"].values()) == [2]  # once for each request
        running.check()
