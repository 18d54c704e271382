"""What a workload must take at least: its passes, a model's bytes, and what both come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import floors, report, run
from bench.workloads import load, passes
from bench.workloads import run as run_workload
from tests.gguf_files import convert

MACHINE = floors.Machine(bandwidth=10.0, rates={"float32": 100.0, "int8": 1000.0})


class Silent:
    """A peer that writes what no prompt has."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts: list[list[int]], max_tokens: int, schema: Any = None) -> list[list[int]]:
        self.calls += len(prompts)
        return [[100_000 + self.calls + i] * max_tokens for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W1", [(128, 1, 1), (1, 1, 127)]),
        ("W2", [(32 * 128, 32, 1), (32, 32, 127)]),
        ("W3", [(1024 + 64 * 32, 64, 1), (64, 64, 15)]),
        ("W6g", []),
    ],
)
def test_fewest_passes(name: str, expected: list[tuple[int, int, int]]) -> None:
    _, waves = run_workload(name, Silent(), load(name, 1))
    found = passes(name, waves)
    assert [each[1:] for each in found] == [each[1:] for each in expected]
    for (rows, *_), (least, *_) in zip(found, expected, strict=True):
        assert 0.98 * least <= rows <= least  # texts repeat a little by chance


def test_a_second_turn_runs_what_is_new() -> None:
    _, waves = run_workload("W4", Silent(), load("W4", 1))
    assert [rows for rows, _, times in passes("W4", waves) if times == 1] == [8 * 64, *[8 * 65] * 3]


@pytest.mark.parametrize("name", ["W1", "W3", "W4", "W5"])
def test_variants_beyond_the_files_share_nothing_with_it_and_as_much_among_themselves(name: str) -> None:
    assert load(name, 3) != load(name, 4)

    def asked(variant: int) -> list[list[int]]:
        return [prompt for prompts, _ in run_workload(name, Silent(), load(name, variant))[1] for prompt in prompts]

    first, again, third = asked(1), asked(4), asked(7)
    assert [prompt[1:] for prompt in first] == [prompt[1:] for prompt in again]
    assert all(len({a[0], b[0], c[0]}) == 3 for a, b, c in zip(first, again, third, strict=True))
    assert len({prompt[0] for prompt in first}) == len({prompt[0] for prompt in again})


def test_the_slower_of_reading_and_multiplying_counts() -> None:
    weights = floors.Weights(body=6, head=4, bytes=40, product="float32")
    assert weights.seconds(1, 1, MACHINE) == 4.0  # 40 bytes at 10 a second
    assert weights.seconds(100, 50, MACHINE) == 2 * (6 * 100 + 4 * 50) / 100
    assert floors.floor([(100, 50, 1), (1, 1, 3)], weights, MACHINE) == 16.0 + 3 * 4.0


def test_bytes_by_precision(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    float32 = floors.weights_of(str(folder), "none")
    assert float32.bytes == 4 * (float32.body + float32.head)
    assert floors.weights_of(str(folder), "int4").bytes == float32.bytes * 4.5 / 32
    with pytest.raises(ValueError, match="is no GGUF file"):
        floors.weights_of(str(folder), "gguf")
    with pytest.raises(ValueError, match="'own' reads is not known"):
        floors.weights_of(str(folder), "own")
    file = convert(folder, tmp_path / "tiny.gguf", "llama")
    assert floors.weights_of(str(file), "gguf").bytes == float32.bytes  # the file is in float32


def test_rounds_of_a_workload() -> None:
    assert [run.rounds_of("3,W1=7,W2=5", name) for name in ("W1", "W2", "W3")] == [7, 5, 3]
    assert run.rounds_of("W1=7", "W2") == run.VARIANTS


def test_tables_show_times_over_the_floor(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]) -> None:
    monkeypatch.setattr(floors, "measure", lambda: MACHINE)
    weights = floors.weights_of(str(tiny_model("llama")), "int8")
    metrics = {"s": 3 * weights.bytes / 10, "out_tok_s": 1.0}
    pair = {"ours": {"metrics": metrics, "passes": [[1, 1, 2]]}, "theirs": {"metrics": dict(metrics)}}
    results = [{"workload": "W1", "peer": "other", "rounds": [pair]}]
    found = run.add_floors(results, str(tiny_model("llama")), "int8")
    assert "| 1.00 (1.00 to 1.00, n=1) | 1.50 |" in report.markdown(results)
    assert "GOP/s in int8" in report.floors_text(found)
