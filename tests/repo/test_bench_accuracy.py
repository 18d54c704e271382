"""The bench of accuracy: float32 agrees with itself, another model does not, and the table says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import accuracy, pairs
from phloem import Engine

SMALL = ["--prompts", "2", "--tokens", "4", "--longest", "24"]


def test_float32_agrees_with_itself(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pairs, "RESULTS", tmp_path)
    shown: list[str] = []
    given = [str(tiny_model("llama")), "--quant", "none,not_installed", *SMALL]
    assert accuracy.main(given, shown.append) == 0
    assert shown[1].startswith("| none | ")
    assert shown[1].endswith("| +0.00 % | 100.00 % | 8 |")
    assert len(shown) == 3  # head, row, where it was kept
    assert len(list(tmp_path.iterdir())) == 1


def test_another_model_is_another_model(tiny_model: Callable[[str], Path]) -> None:
    """What one wrote is not what the other would have, and a text is more likely to the one than to the other."""
    parts = ["The sugar a leaf makes travels down the stem.", "def match(tokens): return tokens"]
    with Engine(str(tiny_model("llama")), grammar="none") as engine:
        texts = accuracy.written(engine, 2, 8)
        own = accuracy.measure(engine, texts, parts, 64)
        tokens = engine.tokenizer.encode(parts[0])
        values = [value for _, value in accuracy.scored(engine, tokens)]
        assert len(values) == len(tokens) - 1
        assert accuracy.perplexity(engine, parts[:1], 64) == pytest.approx(math.exp(-sum(values) / len(values)))
    with Engine(str(tiny_model("qwen2")), grammar="none") as engine:
        other = accuracy.measure(engine, texts, parts, 64)
    assert own.agreement == 1.0
    assert other.agreement < 0.5
    assert abs(other.perplexity / own.perplexity - 1) > 0.01


def test_the_text_is_long_enough_to_tell_a_hundredth() -> None:
    text = accuracy.TEXT.read_text()
    assert 10_000 <= len(text) <= 20_000
    assert len(text.split("\n=====\n")) == 12
