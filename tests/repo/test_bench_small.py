"""Benches of the tree and the cache run to their ends from the command line, on sizes that take no time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import events, eviction, tree, window_memory


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (tree.main, ["--sizes", "600", "--page-size", "4"], "bytes/node"),
        (events.main, ["--requests", "8", "--blocks", "40"], "snapshot"),
        (eviction.main, ["--requests", "40", "--rules", "lru"], "all fits"),
    ],
)
def test_it_ends(
    main: Callable[[], object],
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--json", str(kept)])
    main()
    assert says in capsys.readouterr().out
    assert kept.stat().st_size > 10


def test_a_short_conversation_fits_the_window(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool holds a window, however little is said."""
    window_memory.main([str(tiny_model("gemma3")), "--turns", "2", "--user", "20", "--output", "2", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == ["22", "44"]
