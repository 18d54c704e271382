"""A head that is trained here drafts for the target it was trained on: most of what it drafts is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CORPUS

from phloem import Engine, SamplingParams
from phloem.plugins.command.main import main

Tiny = Callable[[str], Path]
LINES = [line for line in CORPUS.splitlines() if line.isascii() and len(line) > 60]
BEGINNINGS = [" ".join(line.split()[:words]) for words in (2, 3, 4, 5, 6, 7) for line in LINES]


def rehearse(folder: Path, seed: int = 0) -> None:
    """Teach a tiny model in seconds to go on reciting the line that a user begins, and those after it."""
    import transformers

    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    recital = " ".join(LINES)
    texts = []
    for beginning in BEGINNINGS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": beginning}], add_generation_prompt=True, tokenize=False
        )
        rest = recital[recital.index(beginning) + len(beginning) :]
        ids = tokenizer(prompt + (rest + " " + recital * 4)[:600], add_special_tokens=False)["input_ids"]
        texts.append(ids[:128])
    shortest = min(map(len, texts))
    batch = torch.tensor([ids[:shortest] for ids in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        some = batch[torch.randperm(len(batch))[:6]]
        loss = model(some, labels=some).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5, loss
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that repeats itself, and a head for it."""
    import shutil

    root = tmp_path_factory.mktemp("trained")
    target, prompts = root / "target", root / "prompts.txt"
    shutil.copytree(tiny_model("llama"), target)
    rehearse(target)
    prompts.write_text("\n".join(BEGINNINGS) + "\n")
    words: list[Any] = ["train-drafter", "eagle", "--target", target, "--prompts", prompts, "--work", root / "work"]
    words += ["--tokens", 100000, "--vocab", 512, "--epochs", 4, "--batch", 512, "--rate", 0.005, "--threads", 1]
    assert main([*map(str, words), "--set", "cache.tokens=16384", "--out", str(root / "head")]) == 0
    return target, root / "head"


def test_what_it_reports(trained: tuple[Path, Path]) -> None:
    history = json.loads((trained[1] / "config.json").read_text())["training"]["history"]
    assert float(history[-1].partition("acceptance ")[2].split()[0]) > 0.8


@pytest.mark.parametrize("nodes", [{"breadth": 1}, {"breadth": 3}])
def test_it_is_right_with_a_cold_and_with_a_cached_prefix(trained: tuple[Path, Path], nodes: dict[str, int]) -> None:
    target, head = trained
    spec = [{"use": "eagle", "model": str(head), "max_tokens": 3, **nodes}]
    fixed = {"draft_size": "fixed", "threads": 1}
    params = SamplingParams(temperature=0, max_tokens=60)
    with Engine(str(target), cache={"tokens": 4096}, spec=[], engine=fixed) as plain:
        prompts = [plain.tokenizer.chat([{"role": "user", "content": text}]) for text in BEGINNINGS[7::20]]
        expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    with Engine(str(target), cache={"tokens": 4096}, spec=spec, engine=fixed) as engine:
        for cached in (False, True):
            before = engine.stats()
            results = [engine.generate(prompt, params) for prompt in prompts]
            after = engine.stats()
            assert [result.token_ids for result in results] == expected
            for prompt, result in zip(prompts, results, strict=True):
                assert (result.usage.cached_tokens == len(prompt) - 1) == cached
            accepted, decoded = (after[name] - before[name] for name in ("accepted_tokens", "decode_tokens"))
            assert decoded / (decoded - accepted) > 1 + 0.8 + 0.8**2 + 0.8**3, (accepted, decoded, cached)
