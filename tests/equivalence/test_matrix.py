"""Every combination of cache, pages, chunking, overlap, drafts and memory pressure writes what transformers writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import assert_same, engine, greedy, pairwise, prompts, tiny_reference

COUNT = 24
PROMPTS = prompts(8)


def check(
    folder: Path, *, drafter: str | None = None, pool: int = 4096, most: int = 8, **sections: Any
) -> dict[str, Any]:
    """Run `most` of the prompts cold, then warm; both must equal the reference. Returns the engine's stats."""
    reference, texts = tiny_reference(folder), PROMPTS[:most]
    reference.learn(texts, COUNT)
    truth = [reference.greedy(prompt, COUNT) for prompt in texts]
    known = [[*prompt, *tokens] for prompt, (tokens, _) in zip(texts, truth, strict=True)]
    sections["cache"] = {"tokens": pool, **sections.get("cache", {})}
    page = sections["cache"].get("page_size", 1)
    shares = sections["cache"].get("use", "radix") != "chunk"
    with engine(folder, drafter=drafter, texts=known, **sections) as running:
        for warm in (False, True):
            results = running.generate(texts, greedy(COUNT))
            for result, (tokens, margins), prompt in zip(results, truth, texts, strict=True):
                what = f"{'warm' if warm else 'cold'} prompt of {len(prompt)}"
                assert_same(result.token_ids, tokens, margins, what)
                if warm and pool >= 4096:  # a cache that never hits is equal too
                    cached = (len(prompt) - 1) // page * page if shares else 0
                    assert result.usage.cached_tokens == cached, what
        running.check()
        stats = dict(running.stats())
        for group in stats["groups"]:
            assert group["protected"] == group["leased"] == 0
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])
    return stats


AXES = (
    ["llama", "gemma3", "mistral"],
    ["radix", "chunk", "swa"],
    [1, 4],
    [1, 16, 512],
    [None, "Right", "Wrong", "Tree"],
    ["off", "on"],
)
NAMES = ("arch", "cache", "page", "chunk", "drafter", "overlap")


def run_combination(folder: Path, cache: str, page: int, chunk: int, drafter: str | None, overlap: str) -> None:
    stats = check(
        folder,
        drafter=drafter,
        cache={"use": cache, "page_size": page},
        schedule={"chunk": chunk},
        engine={"overlap": overlap},
    )
    if drafter == "Right":
        assert stats["accepted_tokens"] > 0.7 * stats["draft_tokens"] > 0
    if drafter == "Wrong":
        assert stats["draft_tokens"] > 100 > stats["accepted_tokens"]
    if drafter == "Tree":
        assert stats["accepted_tokens"] > 0
    if page == 1 or drafter != "Tree":
        assert stats["moved_kv_bytes"] == 0


@pytest.mark.parametrize(NAMES, pairwise(*AXES))
def test_pairs_of_features(
    tiny_model: Callable[[str], Path], arch: str, cache: str, page: int, chunk: int, drafter: str | None, overlap: str
) -> None:
    """what-breaks 1, 42: a prefix hit changes greedy output."""
    run_combination(tiny_model(arch), cache, page, chunk, drafter, overlap)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, list(itertools.product(*AXES)))
def test_all_combinations(
    tiny_model: Callable[[str], Path], arch: str, cache: str, page: int, chunk: int, drafter: str | None, overlap: str
) -> None:
    run_combination(tiny_model(arch), cache, page, chunk, drafter, overlap)


@pytest.mark.parametrize(("cache", "page", "overlap", "drafter"), pairwise(*(AXES[i] for i in (1, 2, 5, 4))))
def test_retraction_changes_nothing(
    tiny_model: Callable[[str], Path], cache: str, page: int, overlap: str, drafter: str | None
) -> None:
    """what-breaks 12: a pool of about two of the eight requests: all are retracted often, and write the same."""
    stats = check(
        tiny_model("gemma3" if cache == "swa" else "llama"),
        drafter=drafter,
        pool=200,
        cache={"use": cache, "page_size": page},
        schedule={"chunk": 16},
        engine={"overlap": overlap},
    )
    assert stats["retractions"] > 0
