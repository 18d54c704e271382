"""EAGLE heads change no output, whatever they are combined with. Random weights: it is the harm they could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_head

from equivalence.drafter_rig import COUNT, KINDS, PATTERN, TOY, run_features, run_kind, some
from equivalence.harness import engine, greedy, pairwise, prompts, serve
from equivalence.tier_rig import crowd, eventually, run, same, text, tier, tiered, whole
from phloem import Engine, SamplingParams
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


# --- beside another model's drafts


@pytest.mark.parametrize(
    ("arch", "cache", "breadth", "page", "overlap"),
    [("llama", "radix", 1, 4, "on"), ("llama", "chunk", 3, 1, "off"), ("gemma3", "swa", 2, 1, "on")],
)
def test_heads_and_a_draft_model_in_one_tree(
    tiny_model: Tiny, heads: Heads, arch: str, cache: str, breadth: int, page: int, overlap: str
) -> None:
    """Each has KV of its own: one lodges with the target, the other does not. The pool retracts now and then."""
    model = {"use": "draft", "model": str(tiny_model("qwen2")), "breadth": breadth, "max_tokens": 3}
    spec = [model, *spec_of(heads, arch, "eagle3", breadth=breadth)]
    below = {"use": cache, "page_size": page, "tokens": 220}
    stats = run_features(tiny_model(arch), prompts(6), spec, below, 16, overlap, "fixed")
    assert stats["draft_tokens"] > 30
    assert stats["drafters"]["draft"]["total"] > 0


@pytest.mark.parametrize(("heat", "grammar"), [(0.9, None), (0.0, PATTERN)])
def test_kinds_of_requests_with_heads_and_a_draft_model(
    tiny_model: Tiny, heads: Heads, heat: float, grammar: str | None
) -> None:
    model = {"use": "draft", "model": str(tiny_model("qwen2")), "breadth": 2}
    spec = [*spec_of(heads, "llama", "eagle3", breadth=2), model]
    run_kind(tiny_model("llama"), prompts(4), spec, grammar, ("e", "the "), 2, True, 1, heat, 4)


# --- what is kept of tokens goes where their K and V go


def drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What heads will propose, by the text behind which they do."""
    made: dict[tuple[int, ...], tuple[int, ...]] = {}
    asked = EagleDrafter.propose_all

    def propose_all(self: EagleDrafter, contexts: Any, budgets: Any) -> Any:
        answers = asked(self, contexts, budgets)
        made.update((tuple(c.tokens), d.tokens) for c, d in zip(contexts, answers, strict=True) if d)
        return answers

    monkeypatch.setattr(EagleDrafter, "propose_all", propose_all)
    return made


def alike(some: dict[Any, Any], others: dict[Any, Any], least: int) -> None:
    """The same drafts behind the same texts, of which there are so many.

    Not behind a prompt: that is drafted for only if its last token but one was run before, as behind a cached prefix.
    """
    both = some.keys() & others.keys()
    assert len(both) >= least
    assert {text: some[text] for text in both} == {text: others[text] for text in both}


def evict(running: Engine) -> None:
    """All that nobody keeps."""
    for group in range(len(running.stats()["groups"])):
        running.invoke(lambda core, group=group: core.ledger.cache.evict(10**6, group)).result()


KEPT = [("llama", "radix", 1), ("llama", "radix", 4), ("gemma3", "swa", 4), ("lfm2", "hybrid", 1)]


@pytest.mark.parametrize(("arch", "cache", "page"), KEPT)
def test_sessions_and_pins_with_heads(
    tiny_model: Tiny, heads: Heads, monkeypatch: pytest.MonkeyPatch, arch: str, cache: str, page: int
) -> None:
    """Behind what is held or pinned a head drafts what it drafts behind a text that was just computed."""
    folder, made = tiny_model(arch), drafts(monkeypatch)
    spoken, pinned, *others = prompts(5, low=64, high=64, shared=0)
    below = {"page_size": page, "tokens": 1024, "pin_share": 0.25}
    sections: dict[str, Any] = {"spec": spec_of(heads, arch, "eagle3", breadth=2)}
    schedule = {"max_running": 2, "chunk": 16, "hold_share": 0.5}
    texts: list[list[int]] = []
    with engine(folder, cache={"use": cache, **below}, schedule=schedule, **sections) as running:
        first = running.generate(spoken, greedy(COUNT), hold="talk")
        running.pin("system", pinned)
        for other in others:
            serve(running, folder, [other], COUNT)
        evict(running)
        texts += [[*spoken, *first.token_ids, 5], [*pinned, 5]]
        made.clear()
        for turn in texts:
            (result,) = serve(running, folder, [turn], COUNT, hold="talk")
            assert result.usage.cached_tokens >= (len(turn) - 2) // page * page
        stats = running.stats()
        assert stats["drafter_failures"] == {}
        running.check()
    warm = {**made}
    made.clear()
    with engine(folder, cache={"use": "chunk", "page_size": page}, **sections) as running:
        for turn in texts:
            serve(running, folder, [turn], COUNT)
    alike(warm, made, 20)


@pytest.mark.parametrize(
    ("arch", "cache", "page"), [("lfm2", "hybrid", 1), ("mamba2", "hybrid", 16), ("gemma3", "swa", 4)]
)
def test_heads_over_a_disk(
    tiny_model: Tiny, heads: Heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, cache: str, page: int
) -> None:
    """In the next life a head drafts behind what is loaded as behind what was computed."""
    folder, made, asked = tiny_model(arch), drafts(monkeypatch), [text(81, 200), text(82, 150)]
    sections: dict[str, Any] = {"spec": spec_of(heads, arch, "eagle3", breadth=2), "cache": {"use": cache}}
    sections["cache"]["page_size"] = page
    lives = []
    for life in range(2):
        with tiered(folder, tmp_path, host=None, **sections) as running:
            for prompt in asked:
                got, cached = run(running, prompt)
                same(folder, prompt, got, f"life {life}")
                assert cached == (whole(prompt) if life else 0)
            lives.append({**made})
            made.clear()
            crowd(running)
            eventually(lambda: not tier(running, "disk", "backlog"))
            assert running.stats()["drafter_failures"] == {}
        made.clear()
    alike(*lives, 4)


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
