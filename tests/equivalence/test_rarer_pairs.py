"""Pairs of features that no other matrix brings together: keys, windows, eviction rules, preemption, processors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from support import WINDOW

from equivalence.harness import TOYS, assert_same, engine, greedy, pairwise, prompts, tiny_reference
from equivalence.test_steps import Stepper
from equivalence.test_text_drafters import SPECS, repetitive
from phloem import Engine, SamplingParams
from phloem.interfaces import PluginContext, RowContext
from phloem.registry import Registry
from phloem.results import Result

Tiny = Callable[[str], Path]
COUNT = 24
KEYS = {"use": f"{Path(__file__).with_name('toy_keys.py')}:Own"}
TOY = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"(the|a) (quick|slow) (fox|dog)s?( and so on)?\."
# Room for three running requests and hardly anything else in the pool of windows.
SCARCE: dict[str, Any] = {"max_running": 3, "max_tokens_per_step": 32, "chunk": 16}


def first(most: int, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The first rows, which hold the most pairs, in the fast suite; the others in the slow one."""
    return [row if i < most else pytest.param(*row, marks=pytest.mark.slow) for i, row in enumerate(rows)]


def known(folder: Path, texts: Sequence[list[int]], count: int = COUNT) -> list[list[int]]:
    """Each text with what the reference writes behind it."""
    tiny_reference(folder).learn(texts, count)
    return [[*text, *tiny_reference(folder).greedy(text, count)[0]] for text in texts]


def together(running: Engine, calls: Sequence[tuple[list[int], SamplingParams, dict[str, Any]]]) -> list[Result]:
    """Calls of different kinds, all at once."""

    async def run() -> list[Result]:
        return list(await asyncio.gather(*(running.agenerate(text, own, **more) for text, own, more in calls)))

    return asyncio.run(run())


def empty(running: Engine) -> None:
    """Slots add up, and all come back."""
    running.check()
    running.flush_cache()
    assert all(group["free"] == group["total"] for group in running.stats()["groups"])


# --- key schemes


@pytest.mark.parametrize(
    ("arch", "cache", "page", "spec", "overlap", "tokens"),
    first(
        6, pairwise(["gemma3", "mistral"], ["radix", "swa"], [1, 4], [None, "Tree", *SPECS], ["off", "on"], [4096, 240])
    ),
)
def test_keys_with_windows_and_drafts(
    tiny_model: Tiny, arch: str, cache: str, page: int, spec: str | None, overlap: str, tokens: int
) -> None:
    """Two callers of the same texts write the same and share the beginning only, with room and without."""
    folder, shared = tiny_model(arch), 9
    texts = repetitive(folder)
    toy = {"use": f"{TOYS}:Tree", "texts": known(folder, texts)}
    drafters = {"Tree": [toy], None: []}.get(spec) if spec not in SPECS else SPECS[spec]
    sections = {
        "cache": {"use": cache, "page_size": page, "tokens": tokens, "key": {**KEYS, "shared": shared}},
        "schedule": {"chunk": 16},
        "engine": {"overlap": overlap},
    }
    with engine(folder, spec=drafters, **sections) as running:
        for caller, before in (("a", None), ("a", "a"), ("b", "a")):
            for text, result in zip(texts, running.generate(texts, greedy(COUNT), routing_key=caller), strict=True):
                assert_same(result.token_ids, *tiny_reference(folder).greedy(text, COUNT), f"{caller}: {len(text)}")
                most = len(text) - 1
                if tokens == 4096 and before is not None:
                    found = (most if caller == before else min(shared, most)) // page * page
                    # a match of a cache with windows ends where one is kept: at the beginning nothing is split off yet
                    assert result.usage.cached_tokens == found or (cache == "swa" and caller != before)
                    assert result.usage.cached_tokens <= found
        stats = running.stats()
        assert (stats["draft_tokens"] > 0) == (spec is not None)
        assert stats["accepted_tokens"] > 20 or spec != "Tree"
        assert stats["retractions"] > 0 or tokens == 4096 or cache == "swa"
        empty(running)


@pytest.mark.parametrize("spec", ["ngram", "suffix"])
def test_drafts_tell_a_caller_nothing_of_another(tiny_model: Tiny, spec: str) -> None:
    """what-breaks 3: what keys keep apart drafters keep apart, or the speed of an answer tells who asked before."""
    folder = tiny_model("llama")
    texts = repetitive(folder)
    drafted = []
    for before in ([], ["a"]):
        with engine(folder, spec=SPECS[spec], cache={"key": {**KEYS, "shared": 0}}) as running:
            for caller in before:
                running.generate(texts, greedy(COUNT), routing_key=caller)
            begun = running.stats()
            for text in texts:
                running.generate(text, greedy(COUNT), routing_key="b")
            ended = running.stats()
            drafted.append([ended[name] - begun[name] for name in ("draft_tokens", "accepted_tokens", "steps")])
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize(
    ("arch", "cache", "page"), [("llama", "radix", 4), ("gemma3", "swa", 1), ("mistral", "swa", 4)]
)
def test_pins_by_keys(tiny_model: Tiny, arch: str, cache: str, page: int) -> None:
    """A pin is found again under the keys it was made with, and only there, after a flush and in a full pool."""
    folder = tiny_model(arch)
    pinned, *others = prompts(8, low=60, high=60, shared=0)
    sections = {"use": cache, "page_size": page, "tokens": 512, "pin_share": 0.25, "key": {**KEYS, "shared": 8}}
    with engine(folder, cache=sections, schedule={**SCARCE, "max_running": 2}) as running:
        running.pin("system", pinned)
        for other in others:
            running.generate(other, greedy(COUNT), routing_key="a")
        running.flush_cache()
        whole = [*pinned, 5, 6]
        first = running.generate(whole, greedy(COUNT))
        assert first.usage.cached_tokens == len(pinned) // page * page
        second = running.generate(whole, greedy(COUNT), routing_key="a")
        assert second.usage.cached_tokens <= 8
        for result in (first, second):
            assert_same(result.token_ids, *tiny_reference(folder).greedy(whole, COUNT))
        assert running.unpin("system")
        empty(running)


# --- preemption


@pytest.mark.parametrize(
    ("arch", "cache", "page", "spec", "overlap"),
    first(4, pairwise(["llama", "gemma3"], ["radix", "swa"], [1, 4], ["Right", "Tree", "both"], ["off", "on"])),
)
def test_preemption_with_drafts(tiny_model: Tiny, arch: str, cache: str, page: int, spec: str, overlap: str) -> None:
    """Each call that comes takes the place of the lowest, whose draft is in the plan or under way."""
    folder = tiny_model(arch)
    texts = repetitive(folder)
    toy = {"use": f"{TOYS}:{spec}", "texts": known(folder, texts, 2 * COUNT)}
    stepper = Stepper(
        folder,
        spec=SPECS.get(spec) or [toy],
        cache={"use": cache, "page_size": page},
        schedule={"use": "priority", "preempt_at": 1, "max_running": 2, "chunk": 16},
        engine={"overlap": overlap, "draft_size": "fixed"},
        grammar="none",
    )
    for i, text in enumerate(texts):
        stepper.submit(f"{i}", text, greedy(2 * COUNT), priority=i)
        for _ in range(3 + i % 3):
            stepper.step()
    stepper.finish()
    for i, text in enumerate(texts):
        assert_same(stepper.tokens(f"{i}"), *tiny_reference(folder).greedy(text, 2 * COUNT), f"{i}: {len(text)}")
    stats = stepper.core.stats()
    assert stats["retractions"] > 2
    assert stats["accepted_tokens"] > (20 if spec != "both" else 3)
    assert stepper.all_free()


# --- grammars, behind windows


@pytest.mark.parametrize(
    ("arch", "page", "overlap", "heat"),
    [("gemma3", 1, "on", 0.0), ("mistral", 4, "off", 1.0), ("gemma3", 4, "off", 1.0)],
)
def test_grammars_behind_windows(tiny_model: Tiny, arch: str, page: int, overlap: str, heat: float) -> None:
    """Constrained and free calls, with the grammar's drafts, where windows are evicted all the time."""
    folder = tiny_model(arch)
    texts = prompts(8, low=2, high=3 * WINDOW)
    bound = SamplingParams(temperature=heat, seed=9, max_tokens=60, regex=PATTERN)
    calls = [(text, bound if i % 4 else greedy(COUNT), {}) for i, text in enumerate(texts)]
    with engine(folder, grammar=TOY, spec=[], cache={"use": "chunk"}) as running:
        plain = [result.token_ids for result in together(running, calls)]
    cache = {"use": "swa", "page_size": page, "window_every": 4096}
    with engine(folder, grammar=TOY, cache=cache, schedule=SCARCE, engine={"overlap": overlap}) as running:
        for _ in range(3):
            assert [result.token_ids for result in together(running, calls)] == plain
        assert running.stats()["accepted_tokens"] > 20
        empty(running)


# --- logits processors


class Wanderer:
    """Forbids what was written last and likes tokens whose number depends on how much was written: a changing rule."""

    api = 1
    capabilities = frozenset[str]()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def validate(self, arguments: dict[str, Any]) -> None:
        """Anything goes."""

    def process(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """In place."""
        for i, row in enumerate(rows):
            logits[i, (len(row.output) + len(row.prompt)) % 7 :: 7] += row.arguments["liking"]
            logits[i, list(row.output[-3:])] = -torch.inf


@pytest.mark.parametrize(
    ("overlap", "tokens", "page", "chunk", "drafter"),
    first(4, pairwise(["off", "on"], [4096, 200], [1, 4], [3, 64], [None, "Right", "Tree"])),
)
def test_processors_running_ahead_and_retracted(
    tiny_model: Tiny, overlap: str, tokens: int, page: int, chunk: int, drafter: str | None
) -> None:
    """Half the calls have one: what it sees and what it changes is the same as for each call alone."""
    folder = tiny_model("llama")
    texts = prompts(8)
    own = {"logits_processors": {"Wanderer": {"liking": 4.0}}}
    calls = [(text, greedy(COUNT, **own) if i % 2 else greedy(COUNT), {}) for i, text in enumerate(texts)]
    samplers = [{"use": f"{__file__}:Wanderer"}]
    with engine(folder, samplers=samplers, cache={"use": "chunk"}) as running:
        plain = [running.generate(text, params).token_ids for text, params, _ in calls]
    written = [[*text, *tokens] for text, tokens in zip(texts, plain, strict=True)]
    sections = {
        "cache": {"tokens": tokens, "page_size": page},
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap},
    }
    with engine(folder, samplers=samplers, drafter=drafter, texts=written, **sections) as running:
        for _ in range(2):
            assert [result.token_ids for result in together(running, calls)] == plain
        stats = running.stats()
        assert (stats["retractions"] > 0) == (tokens == 200)
        assert (stats["accepted_tokens"] > 50) == (drafter is not None)
        empty(running)


# --- sessions, forks and holds, behind windows


@pytest.mark.parametrize(("arch", "overlap"), [("gemma3", "on"), ("mistral", "off")])
def test_sessions_behind_windows(tiny_model: Tiny, arch: str, overlap: str) -> None:
    """Conversations in turn, each found whole, or given up for want of window slots and then computed again."""
    folder = tiny_model(arch)
    texts = prompts(6, low=WINDOW // 2, high=3 * WINDOW, shared=WINDOW // 2)
    cache = {"use": "swa", "tokens": 1024, "window_every": 1024}
    with engine(folder, cache=cache, schedule=SCARCE, engine={"overlap": overlap}) as running:
        found = 0
        for turn in range(3):
            for i, text in enumerate(texts):
                result = running.generate(text, greedy(10), hold=f"session {i}")
                assert_same(result.token_ids, *tiny_reference(folder).greedy(text, 10), f"turn {turn} of {i}")
                found += result.usage.cached_tokens
                texts[i] = [*text, *result.token_ids, 5 + turn]
        stats = running.stats()
        assert found > sum(map(len, texts)) // 2
        assert stats["holds"]["count"] > 1
        assert stats["retractions"] == 0
        for i in range(len(texts)):
            running.drop_hold(f"session {i}")
        empty(running)


@pytest.mark.parametrize(
    ("arch", "page", "chunk", "overlap"), [("gemma3", 1, 3, "off"), ("mistral", 1, 64, "on"), ("gemma3", 4, 5, "on")]
)
def test_forks_behind_windows(tiny_model: Tiny, arch: str, page: int, chunk: int, overlap: str) -> None:
    """A tree of declared siblings, twice as deep as a window, with scoring and holds: each prefix computed once."""
    folder = tiny_model(arch)
    root = prompts(1, low=2 * WINDOW, high=2 * WINDOW, shared=0)[0]
    texts = [[*root, 100 + i, *range(60, 60 + WINDOW), 200 + j, 9] for i in range(3) for j in range(3)]
    cache = {"use": "swa", "page_size": page}
    stepper = Stepper(folder, cache=cache, schedule={"chunk": chunk}, engine={"overlap": overlap}, grammar="none")
    for i, text in enumerate(texts):
        more: dict[str, Any] = {"score": [[5, 6], [7]]} if i % 4 == 3 else {"hold": f"{i}"}
        stepper.submit(f"{i}", text, SamplingParams() if "score" in more else greedy(COUNT), group="g", **more)
        stepper.step()
    stepper.finish()
    least = len({tuple(text[:n]) for text in texts for n in range(1, len(text))}) + len(texts)
    assert stepper.core.stats()["prefill_tokens"] == least or page > 1
    for i, text in enumerate(texts):
        if i % 4 != 3:
            assert_same(stepper.tokens(f"{i}"), *tiny_reference(folder).greedy(text, COUNT), f"{i}")
            stepper.submit(f"{i} again", [*text, *stepper.tokens(f"{i}"), 8], greedy(4), hold=f"{i}")
            stepper.finish()
            (*_, last) = stepper.of(f"{i} again")
            assert last.usage.cached_tokens == (len(text) + COUNT - 1) // page * page
            stepper.core.drop_hold(f"{i}")
    assert stepper.all_free()


# --- drafts from text, behind windows that are evicted


@pytest.mark.parametrize(
    ("arch", "spec", "page", "overlap"),
    [("gemma3", "ngram", 4, "on"), ("mistral", "suffix", 1, "off"), ("gemma3", "both", 1, "on")],
)
def test_text_drafts_where_windows_are_scarce(tiny_model: Tiny, arch: str, spec: str, page: int, overlap: str) -> None:
    folder = tiny_model(arch)
    texts = repetitive(folder, 8)
    cache = {"use": "swa", "page_size": page, "window_every": 4096, "tokens": 512}
    with engine(folder, spec=SPECS[spec], cache=cache, schedule=SCARCE, engine={"overlap": overlap}) as running:
        for _ in range(2):
            for text, result in zip(texts, running.generate(texts, greedy(COUNT)), strict=True):
                assert_same(result.token_ids, *tiny_reference(folder).greedy(text, COUNT), f"{len(text)}")
        assert running.stats()["accepted_tokens"] > 50
        empty(running)


# --- eviction rules and drafts


@pytest.mark.parametrize("rule", Registry().names("eviction"))
def test_eviction_rules_with_drafts(tiny_model: Tiny, rule: str) -> None:
    """Whatever goes first from a pool too small, the tokens stay; rejected drafts leave nothing behind."""
    arch, cache, page = ("gemma3", "swa", 1) if rule in ("lru", "slru", "cost") else ("llama", "radix", 4)
    folder = tiny_model(arch)
    texts = repetitive(folder)
    drafters = [{"use": f"{TOYS}:Tree", "texts": known(folder, texts)}, *SPECS["ngram"]]
    sections = {"cache": {"use": cache, "page_size": page, "tokens": 240, "eviction": rule}, "schedule": {"chunk": 16}}
    if rule == "priority":
        sections["schedule"]["use"] = "priority"
    with engine(folder, spec=drafters, **sections) as running:
        for _ in range(2):
            for text, result in zip(texts, running.generate(texts, greedy(COUNT)), strict=True):
                assert_same(result.token_ids, *tiny_reference(folder).greedy(text, COUNT), f"{rule}: {len(text)}")
        stats = running.stats()
        assert stats["evicted_tokens"] > 0
        assert stats["accepted_tokens"] > 50
        empty(running)
