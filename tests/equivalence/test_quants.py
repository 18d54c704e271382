"""Under each quant a model writes one text: cold, from the cache, in chunks, in company, and with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import engine, greedy, prompts
from phloem import Engine
from phloem.errors import ConfigError

Tiny = Callable[[str], Path]
QUANTS: dict[str, dict[str, Any]] = {
    "none": {"use": "none"},
    "bf16": {"use": "bf16"},
    "int8": {"use": "int8"},
    "int4": {"use": "int4"},
    "gguf": {"use": "gguf"},
}
ARCHITECTURES = ("llama", "gemma3", "lfm2")
TEXTS = prompts(4, low=20, high=60)
LENGTH = 16


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_text_however_it_is_run(tiny_model: Tiny, quant: str, arch: str) -> None:
    """The quant's own tokens, to the last one: its products are the same for one row and for many."""
    sections: dict[str, Any] = {"quant": QUANTS[quant], "attention": "cpu"}
    with engine(tiny_model(arch), **sections) as running:
        alone = [running.generate([text], greedy(LENGTH))[0].token_ids for text in TEXTS]
    written = [[*text, *tokens] for text, tokens in zip(TEXTS, alone, strict=True)]
    for chunk, drafter, threads in ((512, None, 1), (5, "Right", 2), (16, "Tree", 1), (64, "Wrong", 1)):
        more = {"schedule": {"chunk": chunk}, "engine": {"threads": threads}}
        with engine(tiny_model(arch), drafter=drafter, texts=written, **sections, **more) as running:
            for _ in range(2):
                together = running.generate(TEXTS, greedy(LENGTH))
                assert [result.token_ids for result in together] == alone, (chunk, drafter)
            stats = running.stats()
            assert stats["drafter_failures"] == {}
            right = {"Right"} if arch == "lfm2" else {"Right", "Tree"}  # there a tree is cut to its best-looking path
            assert (stats["accepted_tokens"] > LENGTH) == (drafter in right)
            assert stats["cached_tokens"] > 0


@pytest.mark.parametrize("quant", QUANTS)
def test_a_model_that_keeps_its_own_weights_is_refused(tiny_model: Tiny, quant: str) -> None:
    """Both lines are quoted; `none` asks for nothing."""
    sections: dict[str, Any] = {"model": {"use": "transformers"}, "quant": QUANTS[quant], "grammar": "none"}
    if quant == "none":
        Engine(str(tiny_model("llama")), **sections).close()
        return
    with pytest.raises(ConfigError, match=f"quant: '{quant}' needs model with quant") as refused:
        Engine(str(tiny_model("llama")), **sections)
    assert "argument quant" in str(refused.value)
    assert "argument model" in str(refused.value)
