"""Hidden states that drafters read: transformers' own, of every verified token once, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import TOYS, assert_same, engine, greedy, pairwise, prompts, tiny_reference
from phloem.errors import ConfigError

COUNT = 20
Tiny = Callable[[str], Path]


@torch.inference_mode()
def reference_states(folder: Path, text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[len(text), layers, hidden] by transformers."""
    out = tiny_reference(folder).model(torch.tensor([text]), output_hidden_states=True)
    return torch.stack([out.hidden_states[layer][0] for layer in layers], 1)


# architecture, page size, chunk, pool, overlap, draft nodes
AXES: tuple[list[Any], ...] = (["llama", "gemma3"], [1, 4], [3, 512], [4096, 220], ["off", "on"], [4, 0])


@pytest.mark.parametrize("combination", pairwise(*AXES))
def test_every_verified_token_once(tiny_model: Tiny, combination: tuple[Any, ...]) -> None:
    arch, page, chunk, pool, overlap, nodes = combination
    folder = tiny_model(arch)
    asked = prompts(5)
    truth = [tiny_reference(folder).greedy(prompt, COUNT) for prompt in asked]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(asked, truth, strict=True)]
    sections: dict[str, Any] = {
        "cache": {"use": "chunk", "page_size": page, "tokens": pool},
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap, "draft_tokens": nodes},
    }
    with engine(folder, drafter="Watches", texts=texts, **sections) as running:
        for result, (tokens, margins) in zip(running.generate(asked, greedy(COUNT)), truth, strict=True):
            assert_same(result.token_ids, tokens, margins)
        stats = running.stats()
        watcher = running.core.parts.drafting.drafters[0][1]
    assert stats["drafter_failures"] == {}
    if nodes:
        assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert len(watcher.seen) == len(asked)
    for name, pieces in watcher.seen.items():
        text = watcher.texts[name]
        expected = reference_states(folder, text, watcher.layers)
        end = 0
        for start, states in pieces:
            assert start == end or (start == 0 and stats["retractions"] > 0)
            end = start + len(states)
            assert end <= len(text)
            torch.testing.assert_close(states, expected[start:end], atol=2e-3, rtol=1e-3)
        assert end >= len(text) - 1  # all but the newest


def test_a_cached_prefix_is_not_told(tiny_model: Tiny) -> None:
    folder, prompt = tiny_model("llama"), prompts(1)[0]
    with engine(folder, drafter="Watches", cache={"page_size": 4}) as running:
        running.generate(prompt, greedy(5))
        result = running.generate(prompt, greedy(5))
        watcher = running.core.parts.drafting.drafters[0][1]
    first = list(watcher.seen.values())[1][0]
    assert first[0] == result.usage.cached_tokens > 0
    expected = reference_states(folder, prompt, watcher.layers)[first[0] :]
    torch.testing.assert_close(first[1], expected, atol=2e-3, rtol=1e-3)


def test_layers_that_are_not_there_are_refused(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match="reads hidden states of layer 99, and the model has those of 0 to 3"):
        engine(tiny_model("llama"), drafter="Beyond")


def test_a_model_without_them_is_refused(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match="needs model with hidden_states"):
        engine(tiny_model("llama"), drafter="Watches", model={"use": "transformers"})


def test_a_watcher_that_fails_is_switched_off(tiny_model: Tiny) -> None:
    folder, asked = tiny_model("llama"), prompts(2)
    with engine(folder, spec=[{"use": f"{TOYS}:Blind"}]) as running:
        for result, prompt in zip(running.generate(asked, greedy(COUNT)), asked, strict=True):
            assert_same(result.token_ids, *tiny_reference(folder).greedy(prompt, COUNT))
        assert list(running.stats()["drafter_failures"].values()) == [2]
