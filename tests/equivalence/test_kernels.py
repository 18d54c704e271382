"""Both attention kernels write what transformers writes, beside caches, chunks, drafts and shared prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equivalence.harness import engine, pairwise, prompts, serve
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
