"""What docs/language.md and the examples say of servers, on a server: snippets marked `client`, and `--url`.

All other snippets of the page are run by tests/repo/test_docs.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live

import phloem.lang as pl

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path]) -> Iterator[Live]:
    with Live(tiny_model("llama")) as live:
        yield live


def definitions(text: str) -> ast.Module:
    """The imports and functions of a snippet."""
    kept = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))]
    return ast.Module(kept, [])


def test_client_snippets_run_on_a_server(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = FENCE.findall((ROOT / "docs" / "language.md").read_text())
    model = server.openai.models.list().data[0].id
    names: dict[str, Any] = {}
    ran = 0
    for words, text in snippets:
        if "client" in words.split():
            here = text.replace("http://127.0.0.1:30000", server.url).replace("smollm2-135m", model)
            exec(compile(here, "docs/language.md", "exec"), names)
            ran += 1
        else:
            exec(compile(definitions(text), "docs/language.md", "exec"), names)
    assert ran
    assert capsys.readouterr().out.strip()
    pl.set_default_backend(None)


def test_an_example_runs_as_a_script_on_a_server(server: Live) -> None:
    """The example with forks and a select, so that all routes are used."""
    command = [sys.executable, str(ROOT / "examples" / "lang" / "llm_judge.py"), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[-1] in [f"Grade: {grade}" for grade in "ABCDE"]
    assert any(line.startswith("Evidence: ") for line in lines)


def public(of: type) -> list[str]:
    """Methods and properties that programs may use."""
    return [name for name in vars(of) if not name.startswith("_") and name != "is_program_state"]


def test_the_page_names_everything_that_programs_can_use() -> None:
    text = (ROOT / "docs" / "language.md").read_text()
    names = [*pl.__all__, *(name for of in (pl.State, pl.StateGroup, pl.Program) for name in public(of))]
    missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert sorted(set(missing)) == []
