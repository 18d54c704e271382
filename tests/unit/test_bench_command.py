"""`phloem bench`: runs on a tiny model, saves what it says it saves, and compares two results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from phloem.plugins.command._load import Shape, prompts, quantile
from phloem.plugins.command.main import main


@pytest.fixture
def saved(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A result of a small run."""
    file = tmp_path / "a.json"
    sizes = ["--requests", "3", "--prefix", "24", "--input", "6", "--output", "4", "--concurrency", "1,3"]
    code = main(
        [
            "bench",
            str(tiny_model("llama")),
            *sizes,
            "--json",
            str(file),
            "--set",
            "cache.tokens=2048",
            "--set",
            "engine.threads=1",
        ]
    )
    assert code == 0
    return file


def test_a_run_is_saved_with_its_context(saved: Path) -> None:
    report = json.loads(saved.read_text())
    assert report["workload"] == {"name": "chat", "requests": 3, "input": 6, "output": 4, "prefix": 24}
    assert report["config"]["cache"]["tokens"] == 2048
    assert report["machine"]["versions"]["torch"]
    assert report["seed"] == 0
    first, second = report["runs"]
    assert (first["concurrency"], second["concurrency"]) == (1, 3)
    for run in report["runs"]:
        assert run["output_tok_s"] == pytest.approx(12 / run["elapsed_s"])
        assert 0 < run["ttft_p50_ms"] <= run["ttft_p99_ms"] <= run["e2e_p99_ms"]
        assert run["prefill_tokens"] + run["cached_tokens"] == 3 * 30
        assert run["cached_tokens"] == 2 * 24  # the shared prefix, and nothing left over from the run before


def test_profile_prints_the_parts_of_a_step(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--requests", "2", "--input", "4", "--output", "1", "--concurrency", "2"]
    assert (
        main(
            [
                "bench",
                str(tiny_model("llama")),
                *sizes,
                "--profile",
                "--set",
                "cache.tokens=1024",
                "--set",
                "engine.threads=1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "host share" in out
    assert "commit ms" in out
    assert "ITL" not in out  # one token has no gap after it


def test_compare_shows_ratios_and_what_differs(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.loads(saved.read_text())
    other["runs"][0]["output_tok_s"] = 2 * other["runs"][0]["output_tok_s"]
    other["config"]["schedule"]["chunk"] = 7
    (tmp_path / "b.json").write_text(json.dumps(other))
    capsys.readouterr()
    assert main(["bench", "--compare", str(saved), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "2.000" in out
    assert "config.schedule.chunk: A 512, B 7" in out
    assert "machine" not in out


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "not a result of this version's"), (None, "No such file")],
)
def test_compare_refuses_what_is_no_result(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert main(["bench", "--compare", str(file), str(file)]) == 2
    assert message in capsys.readouterr().err


def test_mistakes_are_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "bench needs a model or a configuration" in capsys.readouterr().err
    assert main(["bench", "no-model", "--json", "nowhere/at/all.json"]) == 2
    assert "the folder does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "no-model", "--concurrency", "1,0"])
    assert "must be a positive integer, got '0'" in capsys.readouterr().err


def test_prompts_repeat_for_a_seed_and_share_their_prefix() -> None:
    shape = Shape(requests=3, input=4, output=1, prefix=5)
    made = prompts(shape, range(100), 1)
    assert made == prompts(shape, range(100), 1)
    assert made != prompts(shape, range(100), 2)
    assert len({tuple(prompt[:5]) for prompt in made}) == 1
    assert len({tuple(prompt[5:]) for prompt in made}) == 3


@pytest.mark.parametrize(("q", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.01, 1.0)])
def test_quantile_is_one_of_the_values(q: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == expected
