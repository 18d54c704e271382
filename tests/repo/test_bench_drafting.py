"""The bench of drafters: its prompts are what it says, its figures add up, and it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import drafting, pairs
from bench.waves import Wave


@pytest.mark.parametrize("name", drafting.SETS)
def test_a_set_has_64_prompts_of_its_own_that_end_in_the_model_s_turn(name: str) -> None:
    made = drafting.prompts(name)
    assert len(set(made)) == 64
    for text in made:
        *before, last = text.split("<|im_start|>")[1:]
        assert last.startswith("assistant\n")
        assert all(turn.endswith("<|im_end|>\n") for turn in before)
        assert [turn.split("\n")[0] for turn in before] == ["user", "assistant"] * (len(before) // 2) + ["user"]
        assert "{who}" not in text
        assert "=====" not in text


def test_figures_of_a_line() -> None:
    grew = {"decode_tokens": 12.0, "accepted_tokens": 8.0, "draft_tokens": 16.0, "steps": 4.0}
    times = {"forward_s": 1.0, "sample_s": 0.2}
    drafted = Wave(2.0, 0.0, [[1] * 12], grew | times)
    without = Wave(6.0, 0.0, [[1] * 12], {"steps": 12.0, "forward_s": 2.4, "sample_s": 0.0})
    line = drafting.row("ngram", "code", 1, 0.0, [drafting.Pair(without, drafted, 0.0004)])
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == drafting.HEAD.split("\n")[0].count("|") - 1
    assert cells[4:9] == ["3.00", "0.333", "8 of 16", "50 %", "100"]
    assert cells[9].startswith("1.50 ")
    assert cells[12].startswith("3.00 ")
    assert cells[13] == "1 of 1"


def test_it_runs(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pairs, "RESULTS", tmp_path)
    shown: list[str] = []
    few = "--spec suffix+ngram --sets json --batch 1,2 --temperature 0 --pairs 2 --tokens 5 --pool 4096"
    assert drafting.main([str(tiny_model("llama")), *few.split()], shown.append) == 0
    assert [line.count("4 of 4") for line in shown if line.startswith("| suffix+ngram | json | 2 |")] == [1]
    assert len(json.loads(next(tmp_path.iterdir()).read_text())["runs"]) == 2
