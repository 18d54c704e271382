"""EAGLE heads change no output, whatever they are combined with. Random weights: it is the harm they could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_head

from equivalence.drafter_rig import COUNT, KINDS, PATTERN, TOY, run_features, run_kind, some
from equivalence.harness import engine, greedy, pairwise, prompts, serve
from phloem import SamplingParams
from phloem.plugins.spec.eagle import EagleDrafter

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
    arch, cache = served
    below: dict[str, Any] = {"use": cache, "page_size": page, "tokens": pool}
    if host and cache != "chunk":
        below["host"] = {"size": "8MiB"}
    spec = spec_of(heads, arch, kind, breadth=breadth)
    stats = run_features(tiny_model(arch), prompts(6), spec, below, chunk, overlap, size)
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

# head, breadth, what requests ask for, verification
ASKED: tuple[list[Any], ...] = (["eagle3", "eagle"], [1, 3], *KINDS, ["match", "rejection"])


def run_asked(tiny_model: Tiny, heads: Heads, kind: str, breadth: int, *asked: Any) -> None:
    run_kind(tiny_model("llama"), prompts(4), spec_of(heads, "llama", kind, breadth=breadth), *asked)


@pytest.mark.parametrize("kind", pairwise(*ASKED))
def test_pairs_of_kinds_with_heads(tiny_model: Tiny, heads: Heads, kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model, heads, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(*ASKED))
def test_many_kinds_with_heads(tiny_model: Tiny, heads: Heads, kind: tuple[Any, ...]) -> None:
    run_asked(tiny_model, heads, *kind)


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
