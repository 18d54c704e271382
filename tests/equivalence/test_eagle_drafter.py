"""EAGLE heads change no output, whatever they are combined with. Random weights: it is the harm they could do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_head

from equivalence.harness import engine, greedy, pairwise, prompts, serve
from equivalence.test_text_drafters import PATTERN, TOY, logprobs_of, told
from phloem import SamplingParams
from phloem.plugins.spec.eagle import EagleDrafter
from phloem.results import Result

COUNT = 24
Tiny = Callable[[str], Path]
Heads = Callable[..., str]


@pytest.fixture(scope="session")
def heads(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """`heads(arch, algorithm)` is the folder of a random head for a tiny model."""
    root = tmp_path_factory.mktemp("heads")

    def make(arch: str, algorithm: str = "eagle3") -> str:
        folder = root / f"{arch}-{algorithm}"
        layers = {"mamba2": [0, 1, 3], "lfm2": [1, 2, 3]}.get(arch, [1, 2, 3])
        if not (folder / "config.json").exists():
            make_head(folder, tiny_model(arch), algorithm=algorithm, layers=layers)
        return str(folder)

    return make


def spec_of(heads: Heads, arch: str, kind: str, **options: Any) -> list[dict[str, Any]]:
    """`eagle3`, `eagle`, or one of them beside others (`+`)."""
    beside = [{"use": "grammar"}, {"use": "ngram", "min_match": 1}] if kind.endswith("+") else []
    algorithm = kind.removesuffix("+")
    return [*beside, {"use": algorithm, "model": heads(arch, algorithm), **options}]


def some(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """A hundred of all combinations; the same on every call."""
    return random.Random(3).sample(list(itertools.product(*axes)), 100)


# --- greedy, against transformers

# architecture and cache, head, breadth, page size, chunk, pool, overlap, draft size, host tier
AXES: tuple[list[Any], ...] = (
    [("llama", "radix"), ("llama", "chunk"), ("gemma3", "swa"), ("lfm2", "hybrid")], ["eagle3+", "eagle"],
    [1, 3], [1, 4], [3, 512], [4096, 220], ["off", "on"], ["adaptive", "fixed"], [False, True],
)  # fmt: skip


def run_combination(
    tiny_model: Tiny,
    heads: Heads,
    served: tuple[str, str],
    kind: str,
    breadth: int,
    page: int,
    chunk: int,
    pool: int,
    overlap: str,
    size: str,
    host: bool,
) -> dict[str, Any]:
    (arch, cache), folder = served, tiny_model(served[0])
    sections: dict[str, Any] = {
        "cache": {"use": cache, "page_size": page, "tokens": pool},
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap, "draft_size": size},
        "spec": spec_of(heads, arch, kind, breadth=breadth),
    }
    if host and cache != "chunk":
        sections["cache"]["host"] = {"size": "8MiB"}
    with engine(folder, **sections) as running:
        for _ in range(2):
            for result in serve(running, folder, prompts(6), COUNT):
                assert result.usage.completion_tokens == COUNT
        running.check()
        stats = dict(running.stats())
    assert stats["drafter_failures"] == {}
    if size == "fixed":
        assert stats["draft_tokens"] > 30
    if pool == 220 and cache == "radix":
        assert stats["retractions"] > 0
    return stats


@pytest.mark.parametrize("combination", pairwise(*AXES))
def test_pairs_of_features_with_heads(tiny_model: Tiny, heads: Heads, combination: tuple[Any, ...]) -> None:
    """what-breaks 42: drafts change greedy output."""
    run_combination(tiny_model, heads, *combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", some(*AXES))
def test_many_combinations_with_heads(tiny_model: Tiny, heads: Heads, combination: tuple[Any, ...]) -> None:
    run_combination(tiny_model, heads, *combination)


@pytest.mark.parametrize(("arch", "cache"), [("mistral", "swa"), ("mamba2", "hybrid")])
def test_models_without_a_layer_that_sees_all(tiny_model: Tiny, heads: Heads, arch: str, cache: str) -> None:
    """Rows lie where windows are kept, or where nothing but them is: recurrent layers leave token slots empty."""
    run_combination(tiny_model, heads, (arch, cache), "eagle3", 2, 4, 16, 4096, "off", "fixed", False)


# --- grammars, stop strings, logprobs, streams, several choices, seeds: against the same engine without drafters

# head, breadth, grammar, stop strings, logprobs, streamed, n, temperature, page size, verification
KINDS: tuple[list[Any], ...] = (
    ["eagle3", "eagle"], [1, 3], [None, PATTERN], [(), (" fox", "e", "the ")], [None, 2], [False, True], [1, 3],
    [0.0, 0.9], [1, 4], ["match", "rejection"],
)  # fmt: skip


def run_kind(
    tiny_model: Tiny,
    heads: Heads,
    kind: str,
    breadth: int,
    regex: str | None,
    stop: tuple[str, ...],
    logprobs: int | None,
    streamed: bool,
    n: int,
    heat: float,
    page: int,
    verify: str,
) -> None:
    """Seeded requests, so `rejection` verifies them as `match` does."""
    asked = prompts(4)
    params = SamplingParams(
        temperature=heat, seed=7, n=n, max_tokens=30, ignore_eos=regex is None, regex=regex, stop=list(stop),
        logprobs=logprobs, repetition_penalty=1.0 if n == 1 else 1.1,
    )  # fmt: skip

    def run(drafters: list[dict[str, Any]], how: str) -> tuple[list[Result], list[Any], dict[str, Any]]:
        sections: dict[str, Any] = {"cache": {"page_size": page}, "engine": {"verify": how}}
        with engine(tiny_model("llama"), grammar=TOY, spec=drafters, **sections) as running:
            deltas: list[Any] = []
            for prompt in asked if streamed else []:
                outputs = [piece.outputs[0] for piece in running.stream(prompt, params)]
                for i in range(n):
                    own = [output for output in outputs if output.index == i]
                    deltas.append(("".join(o.text for o in own), [t for o in own for t in o.token_ids]))
            results = running.generate(asked, params)
            running.check()
            return results, deltas, dict(running.stats())

    plain, streams, _ = run([], "match")
    drafted, streams_too, stats = run(spec_of(heads, "llama", kind, breadth=breadth), verify)
    assert told(drafted) == told(plain)
    assert streams_too == streams
    if logprobs is not None:
        assert logprobs_of(drafted) == pytest.approx(logprobs_of(plain), abs=1e-3)
    assert stats["drafter_failures"] == {}
    assert stats["draft_tokens"] > 0


@pytest.mark.parametrize("kind", pairwise(*KINDS))
def test_pairs_of_kinds_with_heads(tiny_model: Tiny, heads: Heads, kind: tuple[Any, ...]) -> None:
    run_kind(tiny_model, heads, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(*KINDS))
def test_many_kinds_with_heads(tiny_model: Tiny, heads: Heads, kind: tuple[Any, ...]) -> None:
    run_kind(tiny_model, heads, *kind)


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle"])
def test_half_precision(tiny_model: Tiny, heads: Heads, algorithm: str) -> None:
    """What is kept is of the store's dtype, and the head computes in the model's."""
    with engine(
        tiny_model("llama"), model={"dtype": "bfloat16"}, spec=spec_of(heads, "llama", algorithm, breadth=2)
    ) as running:
        running.generate(prompts(3), greedy(COUNT))
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert stats["draft_tokens"] > 0


# --- what is kept of tokens goes where their K and V go


def test_draws_under_rejection_sampling(tiny_model: Tiny, heads: Heads) -> None:
    """Unseeded requests: chains are drawn, from no more than the grammar allows, and every token is told of."""
    import re

    params = SamplingParams(max_tokens=60, regex=PATTERN, logprobs=0, n=4, temperature=0.8)
    spec = spec_of(heads, "llama", "eagle3")
    with engine(tiny_model("llama"), grammar=TOY, spec=spec, engine={"verify": "rejection"}) as running:
        for result in running.generate(prompts(3), params):
            for output in result.outputs:
                assert output.finish_reason == "length" or re.fullmatch(PATTERN, output.text)
                assert [each.token_id for each in output.logprobs or ()] == output.token_ids
        running.check()
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert stats["draft_tokens"] > 0


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("method", ["keep", "propose_all"])
def test_a_head_that_fails_costs_no_request_its_output(
    tiny_model: Tiny, heads: Heads, monkeypatch: pytest.MonkeyPatch, method: str, overlap: str
) -> None:
    """It may fail where steps run, or where it is asked."""
    folder, asked, calls = tiny_model("llama"), prompts(3), []
    whole = getattr(EagleDrafter, method)

    def fails(self: EagleDrafter, *arguments: Any) -> Any:
        calls.append(method)
        if len(calls) > 3:
            raise RuntimeError("it hurts")
        return whole(self, *arguments)

    monkeypatch.setattr(EagleDrafter, method, fails)
    with engine(folder, spec=spec_of(heads, "llama", "eagle3"), engine={"overlap": overlap}) as running:
        serve(running, folder, asked, COUNT)
        assert running.stats()["drafter_failures"] == {"eagle3": 3}
        assert running.stats()["draft_tokens"] > 0
        if method == "keep":
            assert len(calls) == 4  # it is asked no more
        running.check()


def test_abort_gives_everything_back(tiny_model: Tiny, heads: Heads) -> None:
    with engine(tiny_model("llama"), spec=spec_of(heads, "llama", "eagle3")) as running:
        stream = running.stream(prompts(1)[0], greedy(200))
        next(stream)
        stream.close()
        running.generate(prompts(3), greedy(5))
        running.check()
        running.flush_cache()
        [usage] = running.stats()["groups"]
        assert usage["free"] == usage["total"]
