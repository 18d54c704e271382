"""K and V widths and head counts that differ per layer, in one pool and in one per state group, with everything on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equivalence import uneven_model
from equivalence.harness import assert_same, engine, greedy, pairwise, prompts
from equivalence.uneven_model import LAYERS

PLUGINS = Path(uneven_model.__file__)
PROMPTS = prompts(6, high=40)
COUNT = 20


@pytest.mark.parametrize(
    ("cache", "page", "drafter", "overlap", "pool"),
    pairwise(["radix", "chunk", "swa"], [1, 4], [None, "Right", "Tree"], ["off", "on"], [2048, 128]),
)
def test_layers_of_different_sizes(
    tiny_model: Callable[[str], Path], cache: str, page: int, drafter: str | None, overlap: str, pool: int
) -> None:
    folder = tiny_model("llama")
    truth = [uneven_model.greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, truth, strict=True)]
    sections = {
        "model": {"use": f"{PLUGINS}:Uneven"},
        "cache": {"use": cache, "page_size": page, "tokens": pool},
        "schedule": {"chunk": 16},
        "engine": {"overlap": overlap},
    }
    with engine(folder, drafter=drafter, texts=texts, **sections) as running:
        for warm in (False, True):
            for result, expected, prompt in zip(running.generate(PROMPTS, greedy(COUNT)), truth, PROMPTS, strict=True):
                assert_same(result.token_ids, *expected, f"warm={warm}")
                if warm and pool == 2048:
                    cached = (len(prompt) - 1) // page * page if cache != "chunk" else 0
                    assert result.usage.cached_tokens == cached
        assert (running.stats()["retractions"] > 0) == (pool == 128)
        assert len(running.stats()["groups"]) == (1 if cache == "radix" else 2)
        for i, layer in enumerate(LAYERS):
            kv = running.core.ledger.kv
            slots = running.stats()["groups"][0 if cache == "radix" else layer.group]["total"]
            assert kv.keys[i].shape == (slots, layer.kv_heads, layer.k_dim)
            assert kv.values[i].shape == (slots, layer.kv_heads, layer.v_dim)
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])
