"""Under each quant a model writes one text: cold, from the cache, in chunks, in company, and with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_head

from equivalence.harness import engine, greedy, prompts
from phloem import Engine
from phloem.errors import ConfigError, ModelError

Tiny = Callable[[str], Path]
QUANTS: dict[str, dict[str, Any]] = {
    "auto": {"use": "auto"},
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


@pytest.mark.parametrize(("quant", "drafter", "overlap"), [("int8", "draft", "on"), ("int4", "eagle3", "on")])
def test_drafters_are_quantised_too(tiny_model: Tiny, tmp_path: Path, quant: str, drafter: str, overlap: str) -> None:
    """A draft model and a head, whose products may run beside the target's; they change no output."""
    folder = tiny_model("llama")
    sections: dict[str, Any] = {"quant": quant, "attention": "cpu", "engine": {"overlap": overlap, "threads": 2}}
    with engine(folder, spec=[], **sections) as running:
        alone = [result.token_ids for result in running.generate(TEXTS, greedy(LENGTH))]
    options = {"model": str(folder), "quant": quant}
    if drafter == "eagle3":
        options = {"model": str(make_head(tmp_path / "head", folder, algorithm=drafter, layers=[1, 2, 3]))}
    with engine(folder, spec=[{"use": drafter, **options}], **sections) as running:
        for _ in range(2):
            assert [result.token_ids for result in running.generate(TEXTS, greedy(LENGTH))] == alone
        stats = running.stats()
    assert stats["drafter_failures"] == {}
    assert stats["accepted_tokens"] > 60 if drafter == "draft" else stats["draft_tokens"] > 60


def test_a_draft_model_that_keeps_its_own_weights_is_refused(tiny_model: Tiny) -> None:
    spec = [{"use": "draft", "model": str(tiny_model("llama")), "loader": "transformers", "quant": "int4"}]
    with pytest.raises(ModelError, match=r"spec.draft: model: .* keeps its own weights; quant is int4"):
        Engine(str(tiny_model("llama")), spec=spec, grammar="none")


@pytest.mark.real
@pytest.mark.parametrize("quant", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_default_model_to_the_last_bit(smollm2_path: str, quant: str) -> None:
    """Rounded activations make much of a last bit, so there is none that company, the cache or a draft tree changes."""
    sections: dict[str, Any] = {"quant": quant, "attention": "cpu", "cache": {"tokens": 8192}}
    params = greedy(24, logprobs=0)

    def run(spec: list[Any], *, together: bool) -> list[tuple[list[int], list[float]]]:
        with engine(smollm2_path, spec=spec, **sections) as running:
            system = running.tokenizer.encode("You answer in short and simple sentences. " * 90)  # read once for all
            asked = (
                "Why is the sky blue?",
                "List five colours of the rainbow: red, orange,",
                "def add(a, b):",
                "One, two,",
            )
            texts = [[*system, *running.tokenizer.encode(text)] for text in asked]
            running.generate([system], greedy(1))
            results = running.generate(texts, params) if together else [running.generate([t], params)[0] for t in texts]
            assert not spec or running.stats()["accepted_tokens"] > 10
        return [(result.token_ids, [entry.logprob for entry in result.logprobs or []]) for result in results]

    alone = run([], together=False)
    assert all(len(logprobs) == 24 for _, logprobs in alone)
    assert run([], together=True) == alone
    assert run([{"use": "eagle", "max_tokens": 7}], together=True) == alone


@pytest.mark.parametrize("quant", QUANTS)
def test_a_model_that_keeps_its_own_weights_is_refused(tiny_model: Tiny, quant: str) -> None:
    """Both lines are quoted; `none` and `auto` ask for nothing."""
    sections: dict[str, Any] = {"model": {"use": "transformers"}, "quant": QUANTS[quant], "grammar": "none"}
    if quant in ("none", "auto"):
        Engine(str(tiny_model("llama")), **sections).close()
        return
    with pytest.raises(ConfigError, match=f"quant: '{quant}' needs model with quant") as refused:
        Engine(str(tiny_model("llama")), **sections)
    assert "argument quant" in str(refused.value)
    assert "argument model" in str(refused.value)
