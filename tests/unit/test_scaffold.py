"""`phloem plugins new` writes distributions that install and whose tests pass."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phloem.plugins.command._templates import BODIES
from phloem.plugins.command.main import main
from phloem.registry import KINDS, Registry


def new(folder: Path, kind: str, name: str) -> int:
    return main(["plugins", "new", kind, name, "--into", str(folder)])


def test_tests_of_new_plugins_pass(tmp_path: Path) -> None:
    """Of all kinds in one process, which imports torch once; each distribution's tests are in a file of its own."""
    run_tests(tmp_path, *sorted(set(BODIES) - {"attention", "cache"}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "cache"])
def test_tests_of_a_new_plugin_pass_slowly(tmp_path: Path, kind: str) -> None:
    run_tests(tmp_path, kind)


def run_tests(tmp_path: Path, *kinds: str) -> None:
    for kind in kinds:
        assert new(tmp_path, kind, f"my-{kind}") == 0
    folders = [f"phloem-my-{kind}" for kind in kinds]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--disable-plugin-autoload"]
    done = subprocess.run([*command, *folders], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert all((tmp_path / folder / f"test_{folder.replace('-', '_')}.py").is_file() for folder in folders)


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_a_new_plugin_is_loadable_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = f"toy-{kind}"
    assert new(tmp_path, kind, name) == 0
    folder = tmp_path / f"phloem-{name}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    target = project["entry-points"][f"phloem.{kind}"][name]
    assert target == f"phloem_toy_{kind}:Toy{kind.capitalize()}"
    monkeypatch.syspath_prepend(folder)
    assert Registry().load(kind, target).api == 1
    assert f"use: {name}" in (folder / "README.md").read_text() or kind in ("api", "parser")
    for file in folder.glob("*"):
        assert "$" not in file.read_text()


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("schedule", "Bad Name", "'Bad Name' cannot be a plugin's name"),
        ("schedule", "../x", "cannot be a plugin's name"),
        ("cache", "radix", "a cache plugin named 'radix' is installed already"),
        ("router", "x", "there is no template for kind 'router' (there are for: api, attention,"),
        ("spec", "twice", "phloem-twice exists already"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, message: str) -> None:
    (tmp_path / "phloem-twice").mkdir()
    assert new(tmp_path, kind, name) == 2
    assert message in capsys.readouterr().err


def test_kinds_with_a_template_are_kinds() -> None:
    assert set(BODIES) <= set(KINDS)
