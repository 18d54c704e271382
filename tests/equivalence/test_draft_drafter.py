"""The drafter `draft` changes no output, whatever it is combined with: a tiny model for itself, and another for it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats as statistics

from equivalence.drafter_rig import COUNT, KINDS, PATTERN, TOY, run_features, run_kind, some
from equivalence.harness import TOYS, assert_same, engine, greedy, pairwise, prompts, tiny_reference
from phloem import SamplingParams

Tiny = Callable[[str], Path]


def spec_of(tiny_model: Tiny, kind: str, **options: Any) -> list[dict[str, Any]]:
    """Drafters by name; `another` has other weights, a bias and the same tokenizer."""
    arch = {"itself": "llama", "another": "qwen2", "windows": "mistral"}[kind.removesuffix("+")]
    beside = [{"use": "grammar"}, {"use": "ngram", "min_match": 1}] if kind.endswith("+") else []
    return [*beside, {"use": "draft", "model": str(tiny_model(arch)), **options}]


# --- greedy, against transformers

# drafter, breadth, its slots, cache, page size, chunk, pool, overlap, draft size
AXES: tuple[list[Any], ...] = (
    ["itself", "another", "another+"], [1, 3], ["auto", 120], ["radix", "chunk", "swa"], [1, 4], [3, 512],
    [4096, 220], ["off", "on"], ["adaptive", "fixed"],
)  # fmt: skip


def run_combination(
    tiny_model: Tiny,
    arch: str,
    kind: str,
    breadth: int,
    slots: Any,
    cache: str,
    page: int,
    chunk: int,
    pool: int,
    overlap: str,
    size: str,
) -> dict[str, Any]:
    spec = spec_of(tiny_model, kind, breadth=breadth, tokens=slots, catch_up=64)
    below = {"use": cache, "page_size": page, "tokens": pool}
    stats = run_features(tiny_model(arch), prompts(6), spec, below, chunk, overlap, size)
    if size == "fixed":
        assert stats["draft_tokens"] > 30
    if pool == 220 and cache == "radix":
        assert stats["retractions"] > 0
    return stats


@pytest.mark.parametrize("combination", pairwise(*AXES))
def test_pairs_of_features(tiny_model: Tiny, combination: tuple[Any, ...]) -> None:
    """what-breaks 42: drafts change greedy output."""
    run_combination(tiny_model, "llama", *combination)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("combination", some(*AXES))
def test_many_combinations(tiny_model: Tiny, arch: str, combination: tuple[Any, ...]) -> None:
    run_combination(tiny_model, arch, *combination)


@pytest.mark.parametrize(("arch", "kind"), [("gemma3", "windows"), ("mistral", "another")])
def test_models_with_windows(tiny_model: Tiny, arch: str, kind: str) -> None:
    """Of the target, and of the model that drafts."""
    run_combination(tiny_model, arch, kind, 2, "auto", "swa", 4, 16, 4096, "off", "fixed")


# --- a model that drafts for itself is always right


@pytest.mark.parametrize("page", [1, 4])
def test_its_own_drafts_are_all_accepted(tiny_model: Tiny, page: int) -> None:
    """Cold, and with the prefix cached in both; one text and several together."""
    folder = tiny_model("llama")
    spec = spec_of(tiny_model, "itself", max_tokens=5)
    with engine(folder, spec=spec, cache={"page_size": page}) as running:
        for asked in (prompts(1), prompts(1), prompts(4)):
            before = running.stats()
            running.generate(asked, greedy(COUNT))
            stats = running.stats()
            drafted, taken, steps, wrote = (
                stats[key] - before[key] for key in ("draft_tokens", "accepted_tokens", "steps", "decode_tokens")
            )
            assert taken == drafted == 20 * len(asked)
            assert wrote == COUNT * len(asked)
            assert steps <= COUNT // 6 + 1  # six tokens a verify
        running.check()


# --- grammars, stop strings, logprobs, streams, several choices, seeds: against the same engine without drafters

# drafter, breadth, what requests ask for, verification
ASKED: tuple[list[Any], ...] = (["itself", "another"], [1, 2], *KINDS, ["match", "rejection"])


def run_asked(tiny_model: Tiny, kind: str, breadth: int, *asked: Any) -> None:
    run_kind(tiny_model("llama"), prompts(4), spec_of(tiny_model, kind, breadth=breadth), *asked)


@pytest.mark.parametrize("kind", pairwise(*ASKED))
def test_pairs_of_kinds(tiny_model: Tiny, kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(*ASKED))
def test_many_kinds(tiny_model: Tiny, kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model, *kind)


# --- rejection sampling


def shaken(folder: Path, made: Path) -> Path:
    """A copy of a model whose weights are a little off."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, made)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random_weights = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random_weights)
    model.save_pretrained(made)
    return made


def test_rejection_keeps_the_target_s_distribution(tiny_model: Tiny, tmp_path: Path) -> None:
    """what-breaks 41: chi-square of first tokens, and of second ones after the commonest first, at temperature 1.

    Drafts are those of a model a little off, so that many draws are accepted and many are not.
    """
    folder, prompt = tiny_model("llama"), prompts(1)[0]
    params = SamplingParams(max_tokens=4, ignore_eos=True, top_k=6, n=100)
    spec = [{"use": "draft", "model": str(shaken(folder, tmp_path / "shaken")), "max_tokens": 3}]
    with engine(folder, spec=spec, engine={"verify": "rejection"}) as running:
        results = running.generate([prompt] * 6, params)
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert 100 < stats["accepted_tokens"] < stats["draft_tokens"] - 100, stats
    outputs = [output.token_ids for result in results for output in result.outputs]
    compare([output[0] for output in outputs], distribution(folder, prompt))
    [(common, _)] = Counter(output[0] for output in outputs).most_common(1)
    compare([output[1] for output in outputs if output[0] == common], distribution(folder, [*prompt, common]))


def distribution(folder: Path, text: list[int]) -> dict[int, float]:
    """The six likeliest next tokens, by transformers."""
    with torch.inference_mode():
        best = tiny_reference(folder).model(torch.tensor([text])).logits[0, -1].double().topk(6)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def compare(seen: list[int], expected: dict[int, float]) -> None:
    counts = Counter(seen)
    assert set(counts) <= set(expected)
    rare = [token for token, p in expected.items() if p * len(seen) < 5]
    common = [token for token in expected if token not in rare]
    found = [counts[token] for token in common] + [sum(counts[token] for token in rare)]
    wanted = [expected[token] * len(seen) for token in common] + [sum(expected[t] for t in rare) * len(seen)]
    alive = [i for i, mass in enumerate(wanted) if mass > 0]
    assert statistics.chisquare([found[i] for i in alive], [wanted[i] for i in alive], sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize(
    ("arch", "use", "page", "overlap", "children"),
    [("lfm2", "hybrid", 4, "on", 1), ("gemma3", "swa", 1, "off", 2), ("mistral", "swa", 4, "on", 1)],
)
def test_rejection_with_states_and_windows(
    tiny_model: Tiny, arch: str, use: str, page: int, overlap: str, children: int
) -> None:
    """what-breaks 41: chi-square, n > 1, where a refused draft leaves a state behind or slots before a window.

    Draws are among the tokens that can come, all equally likely: many are accepted, and many are not.
    """
    folder, prompt = tiny_model(arch), prompts(1)[0]
    firsts = distribution(folder, prompt)
    seconds = {token: distribution(folder, [*prompt, token]) for token in firsts}
    places = [[*firsts], sorted(set().union(*seconds.values()))]
    spec = [{"use": f"{TOYS}:Draws", "texts": places, "length": 2, "children": children}]
    sections: dict[str, Any] = {"cache": {"use": use, "page_size": page}, "schedule": {"chunk": 8}}
    params = SamplingParams(max_tokens=3, ignore_eos=True, top_k=6, n=100)
    with engine(folder, spec=spec, engine={"verify": "rejection", "overlap": overlap}, **sections) as running:
        results = running.generate([prompt] * 4, params)
        running.check()
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert 100 < stats["accepted_tokens"] < stats["draft_tokens"] - 100, stats
    outputs = [output.token_ids for result in results for output in result.outputs]
    compare([output[0] for output in outputs], firsts)
    [(common, _)] = Counter(output[0] for output in outputs).most_common(1)
    compare([output[1] for output in outputs if output[0] == common], seconds[common])


@pytest.mark.parametrize(("arch", "use"), [("llama", "radix"), ("lfm2", "hybrid"), ("mistral", "swa")])
def test_rejection_under_a_grammar_with_stops_and_logprobs(tiny_model: Tiny, arch: str, use: str) -> None:
    """The output obeys the grammar, and is told in full; the model's own drafts are drawn under the same mask."""
    import re

    params = SamplingParams(max_tokens=60, regex=PATTERN, logprobs=0, n=4)
    spec = spec_of(tiny_model, {"llama": "itself"}.get(arch, "another"))
    cache = {"use": use}
    with engine(tiny_model(arch), grammar=TOY, spec=spec, engine={"verify": "rejection"}, cache=cache) as running:
        for result in running.generate(prompts(3), params):
            for output in result.outputs:
                assert output.finish_reason == "length" or re.fullmatch(PATTERN, output.text)
                assert [each.token_id for each in output.logprobs or ()] == output.token_ids
        running.check()
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert stats["accepted_tokens"] > (0.9 if arch == "llama" else 0.0) * stats["draft_tokens"]


def test_rejection_accepts_all_of_a_model_s_own_draws(tiny_model: Tiny) -> None:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, top_p=0.95, temperature=0.8, logit_bias={5: 1.0})
    spec = spec_of(tiny_model, "itself", max_tokens=3)
    with engine(tiny_model("llama"), spec=spec, engine={"verify": "rejection"}) as running:
        running.generate(prompts(4), params)
        stats = running.stats()
    assert stats["accepted_tokens"] == stats["draft_tokens"] == 4 * COUNT * 3 // 4


# --- others that fail beside it, and requests that end


def test_a_broken_drafter_beside_it(tiny_model: Tiny) -> None:
    folder = tiny_model("llama")
    spec = [{"use": f"{TOYS}:Nonsense"}, *spec_of(tiny_model, "itself")]
    with engine(folder, spec=spec) as running:
        for result, prompt in zip(running.generate(prompts(3), greedy(COUNT)), prompts(3), strict=True):
            assert_same(result.token_ids, *tiny_reference(folder).greedy(prompt, COUNT))
        assert running.stats()["accepted_tokens"] > 30
        running.check()


def test_everything_comes_back_when_requests_end(tiny_model: Tiny) -> None:
    with engine(tiny_model("llama"), spec=spec_of(tiny_model, "itself")) as running:
        stream = running.stream(prompts(1)[0], greedy(200))
        next(stream)
        stream.close()  # aborts
        running.generate(prompts(3), greedy(5))
        running.check()
        usage = running.stats()["drafters"]["draft"]
        assert usage["leased"] == usage["protected"] == 0
        assert usage["free"] + usage["evictable"] == usage["total"]
        assert usage["evictable"] > 0
        running.flush_cache()
        usage = running.stats()["drafters"]["draft"]
        assert usage["free"] == usage["total"]


# --- a real model


@pytest.mark.slow
@pytest.mark.real
def test_a_real_model_drafts_for_itself(smollm2_path: str) -> None:
    """All of it is accepted, but for ties of the two best logits."""
    spec = [{"use": "draft", "model": smollm2_path, "max_tokens": 5}]
    with engine(smollm2_path, spec=spec, cache={"tokens": 2048}) as running, engine(smollm2_path, spec=[]) as plain:
        asked = ["The sugar a leaf makes travels", "def fibonacci(n):\n", "The capital of France is"]
        drafted, alone = running.generate(asked, greedy(40)), plain.generate(asked, greedy(40))
        assert [result.text for result in drafted] == [result.text for result in alone]
        stats = running.stats()
        assert stats["accepted_tokens"] >= 0.9 * stats["draft_tokens"]
        assert stats["steps"] <= 12
        running.check()
