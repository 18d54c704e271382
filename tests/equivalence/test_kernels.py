"""Both attention kernels write what transformers writes, beside caches, chunks, drafts and shared prefixes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from equivalence.harness import Reference, engine, greedy, pairwise, prompts, serve
from equivalence.test_matrix import check

Tiny = Callable[[str], Path]
AXES = (
    ["cpu", "torch"],
    ["llama", "gemma2", "mistral"],  # gemma2: a soft-cap
    ["radix", "swa"],
    [1, 4],
    [1, 16, 512],
    [None, "Right", "Tree"],
)
NAMES = ("attention", "arch", "cache", "page", "chunk", "drafter")


def run(folder: Path, attention: str, cache: str, page: int, chunk: int, drafter: str | None) -> None:
    sections = {"cache": {"use": cache, "page_size": page}, "schedule": {"chunk": chunk}}
    check(folder, drafter=drafter, attention={"use": attention}, **sections)


@pytest.mark.parametrize(NAMES, [row for row in pairwise(*AXES) if row[0] == "torch"][:5])
def test_pairs_with_the_reference(
    tiny_model: Tiny, attention: str, arch: str, cache: str, page: int, chunk: int, drafter: str | None
) -> None:
    """All other matrices run with the compiled kernel, which is what `auto` means here."""
    run(tiny_model(arch), attention, cache, page, chunk, drafter)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, list(itertools.product(*AXES)))
def test_all_combinations_of_kernels(
    tiny_model: Tiny, attention: str, arch: str, cache: str, page: int, chunk: int, drafter: str | None
) -> None:
    run(tiny_model(arch), attention, cache, page, chunk, drafter)


@pytest.mark.parametrize("page", [1, 4])
def test_many_on_one_prefix(tiny_model: Tiny, page: int) -> None:
    """Enough of them that it is read once for all."""
    folder, texts = tiny_model("llama"), prompts(8, shared=230)[1::2]
    with engine(folder, cache={"page_size": page}) as running:
        for _ in range(2):
            serve(running, folder, texts, 16)


def test_sixteen_bits_like_the_reference(tiny_model: Tiny) -> None:
    """KV in bfloat16, computed with in float32: as near to the reference as roundings of that width allow."""
    (text, other), scores = prompts(2), []
    for attention in ("cpu", "torch"):
        with engine(tiny_model("llama"), model={"dtype": "bfloat16"}, attention=attention) as running:
            scores.append(torch.tensor(running.score(text, [other[:20]])))
    torch.testing.assert_close(*scores, rtol=0.1, atol=0.5)


@functools.cache
def rounded(folder: Path) -> Reference:
    """The reference with weights as sixteen bits hold them, computed with in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return Reference(model.float())


@pytest.mark.parametrize(
    ("arch", "cache", "page", "chunk", "drafter", "host"),
    [
        ("llama", "radix", 1, 512, None, True),
        ("llama", "radix", 4, 5, "Tree", False),
        ("gemma3", "swa", 1, 16, "Right", True),
        ("lfm2", "hybrid", 4, 512, "Right", False),
    ],
)
def test_sixteen_bits_beside_caches_and_drafts(
    tiny_model: Tiny, arch: str, cache: str, page: int, chunk: int, drafter: str | None, host: bool
) -> None:
    """The compiled kernel over KV of sixteen bits: cold, from the pool and host memory, with drafts."""
    folder, texts, compared = tiny_model(arch), prompts(6, low=70, high=90), 0
    rounded(folder).learn(texts, 16)
    known = [rounded(folder).greedy(text, 16) for text in texts]
    below: dict[str, Any] = {"use": cache, "page_size": page, "tokens": 400}
    below["host"] = {"size": "8MiB"} if host else None
    sections: Any = {"model": {"dtype": "bfloat16"}, "attention": "cpu", "schedule": {"chunk": chunk}, "cache": below}
    written = [[*text, *tokens] for text, (tokens, _) in zip(texts, known, strict=True)]
    with engine(folder, drafter=drafter, texts=written, **sections) as running:
        for _ in range(2):
            results = running.generate(texts, greedy(16))
            for result, (tokens, margins) in zip(results, known, strict=True):
                compared += agreed(result.token_ids, tokens, margins)
        stats = running.stats()
        assert (stats["accepted_tokens"] > 20) == (drafter is not None)
        assert stats["drafter_failures"] == {}
        assert not host or stats["tiers"]["loads"] > 0
    assert compared > 100


def agreed(got: Sequence[int], expected: Sequence[int], margins: Sequence[float]) -> int:
    """Tokens that are the reference's, up to one that roundings of sixteen bits may change."""
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine != theirs:
            assert margins[i] < 0.1, f"token {i} is {mine}, the reference has {theirs} by {margins[i]:.3f}"
            return i
    return len(got)
