"""import-linter holds the layering, and these tests see it fail: a contract that cannot fail protects nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package as it is installed: links resolved, so that edits stay in the copy."""
    package = tmp_path / "phloem"
    skip = shutil.ignore_patterns("__pycache__", "plugins", "server", "lang")
    shutil.copytree(ROOT / "core", package, ignore=skip)
    for name in ("plugins", "server", "lang"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the copy, not over the installed package."""
    program = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=tree, capture_output=True, text=True, env=env, check=False
    )


def plugin_modules(tree: Path) -> list[str]:
    """Two public plugin modules, to be made to import each other."""
    files = sorted((tree / "phloem" / "plugins" / "schedule").glob("[!_]*.py"))
    return [f"phloem.plugins.schedule.{file.stem}" for file in files[:2]]


def append(tree: Path, module: str, line: str) -> None:
    """Add a statement at the end of a module."""
    path = tree / Path(*module.split(".")).with_suffix(".py")
    path.write_text(path.read_text() + f"\n{line}\n")


def test_tree_keeps_its_contracts(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


def test_contract_names_every_plugin() -> None:
    """A plugin missing from the list would be free to import others."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (listed,) = [contract["modules"] for contract in contracts if contract["id"] == "plugins"]
    folders = [path for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").exists()]
    public = {
        f"phloem.plugins.{folder.name}.{path.stem}"
        for folder in folders
        for path in folder.glob("[!_]*")
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(listed) == sorted(public)


@pytest.mark.parametrize("target", ["phloem.plugins.schedule.fcfs", "phloem.server"])
def test_core_importing_upwards_is_seen(tree: Path, target: str) -> None:
    append(tree, "phloem.pool", f"def late() -> None:\n    import {target}")
    done = lint(tree)
    assert done.returncode == 1
    assert f"phloem.pool -> {target}" in done.stdout


def test_plugin_importing_a_plugin_is_seen(tree: Path) -> None:
    first, second = plugin_modules(tree)
    append(tree, first, f"import {second}")
    done = lint(tree)
    assert done.returncode == 1
    assert f"{first} -> {second}" in done.stdout


def test_private_module_of_another_kind_is_seen(tree: Path) -> None:
    (tree / "phloem" / "plugins" / "cache" / "_shared.py").write_text('"""Shared among caches."""\n')
    append(tree, plugin_modules(tree)[0], "import phloem.plugins.cache._shared")
    done = lint(tree)
    assert done.returncode == 1
    assert "phloem.plugins.schedule is not allowed to import phloem.plugins.cache" in done.stdout


def test_plugin_and_server_do_not_know_each_other(tree: Path) -> None:
    append(tree, plugin_modules(tree)[0], "import phloem.server")
    assert lint(tree).returncode == 1


def test_a_module_outside_the_layers_is_seen(tree: Path) -> None:
    (tree / "phloem" / "stray.py").write_text('"""Nobody placed this module in a layer."""\n')
    done = lint(tree)
    assert done.returncode == 1
    assert "phloem.stray" in done.stdout + done.stderr
