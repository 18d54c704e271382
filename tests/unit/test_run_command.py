"""`phloem run` with a constraint: what the arguments mean, and what is wrong with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import SamplingParams
from phloem.errors import RequestError
from phloem.plugins.command._sampling import sampling
from phloem.plugins.command.main import main
from phloem.plugins.command.run import run


def parsed(*arguments: str) -> SamplingParams:
    """What a command line asks for."""
    parser = argparse.ArgumentParser()
    run.configure(parser)
    return sampling(parser.parse_args(["model", "prompt", *arguments]))


def test_constraints_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    wanted: list[tuple[list[str], dict[str, Any]]] = [
        (["--json-schema", ' {"type": "array"}'], {"json_schema": {"type": "array"}}),
        (["--json-schema", str(file)], {"json_schema": {"type": "object"}}),
        (["--regex", "a+", "--stop", "b"], {"regex": "a+", "stop": ["b"]}),
        (["--choices", "yes,no, maybe"], {"choices": ["yes", "no", " maybe"]}),
        ([], {}),
    ]
    for arguments, fields in wanted:
        assert parsed(*arguments) == SamplingParams(**{"max_tokens": 256, **fields})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json-schema", "{a"], "argument --json-schema: it is not JSON"),
        (["--json-schema", ""], "argument --json-schema: it is not JSON"),
        (["--json-schema", "nowhere.json"], "the file nowhere.json cannot be read: No such file"),
        (["--json-schema", __file__], "test_run_command.py is not JSON"),
        (["--regex", "a", "--choices", "b"], "not allowed with argument --regex"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*arguments)
    assert words in capsys.readouterr().err


def test_an_empty_choice_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(RequestError, match="choices must be a non-empty list of non-empty strings"):
        parsed("--choices", "a,")


def test_the_answer_follows_the_constraint(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("llama"))
    assert main(["run", model, "hi", "--raw", "--regex", "(ab){3}c", "--set", "engine.threads=1"]) == 0
    assert capsys.readouterr().out == "abababc\n"
