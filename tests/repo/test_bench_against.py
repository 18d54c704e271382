"""Other engines at equal precision: tables, what is not installed, files of another kind that stay the same model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.against import __main__ as against
from bench.against import install, precisions, table
from bench.against.gguf_kinds import convert
from bench.process import memory
from phloem import Engine, SamplingParams
from phloem.plugins.model._source.gguf_file import GgufFile
from tests import gguf_files


def entry(peer: str, ours: list[float], theirs: list[float], **more: Any) -> dict[str, Any]:
    """A result as `bench.run` makes it."""

    def side(seconds: float) -> dict[str, Any]:
        return {"metrics": {"s": seconds, "out_tok_s": 10 / seconds, "floor_s": 1.0}}

    rounds = [{"ours": side(a), "theirs": side(b)} for a, b in zip(ours, theirs, strict=True)]
    return {"workload": "W1", "peer": peer, "rounds": rounds, **more}


def test_a_row_shows_the_best_peer_and_names_the_others() -> None:
    results = [
        entry("slow", [2.0, 2.0], [8.0, 6.0]),
        entry("best", [2.0, 4.0, 2.0], [3.0, 5.0, 2.4]),
        entry("broken", [], [], error="ended with code 1"),
    ]
    (row,) = table.rows(results, {"W1": 1.05})
    assert row.startswith("| W1 | 2.00 | 5.0 | 2.00 | best | 3.00 | 3.3 | 1.25 (1.23 to 1.38, n=3) | >= 1.05 | ")
    assert row.endswith("| slow 3.50; broken failed: ended with code 1 |")
    (none,) = table.rows(results[2:], {})
    assert none.count("|") == row.count("|") == table.HEAD.splitlines()[1].count("|")


def test_a_document_has_a_table_for_each_precision_and_says_what_is_missing() -> None:
    facts = {"about": {"phloem": "0.1.0", "model": "m"}, "ready_s": 1.0, "rest_mb": 600.0, "most_mb": 900.0}
    floors = {"rates": {"float32": 2e11}, "product": "float32", "bytes": 5.4e8, "bandwidth": 2e10}
    made = {"results": [entry("best", [2.0], [3.0])], "engines": {"phloem": facts}, "floors": floors}
    machine = {"processor": "p", "cores": 2, "memory_gib": 1.0, "flags": ["fma"], "versions": {"torch": "1"}}
    whole = {
        "when": "now",
        "machine": machine,
        "missing": {"vllm": "no wheel"},
        "precisions": {"float32": made, "8 bits": {"error": "no quant"}},
    }
    text = table.document(whole)
    assert "### At float32\n" in text
    assert "| phloem | 0.1.0 | 1.0 | 600 | 900 |" in text
    assert "Floors: 540 MB of weights a pass at 20.0 GB/s, or their products at 200 GOP/s in float32" in text
    assert "### At 8 bits\n\nNot measured: no quant" in text
    assert "Left out: vllm: no wheel." in text


def test_what_exists_is_taken_and_what_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"openvino": "env/python", "openvino-int8": "models/int8", "llama_server": "bin/server", "vllm": "other"}
    shelf = install.Shelf(tmp_path, "tiny", have)

    def fail(self: install.Shelf, kind: str) -> str:
        code = "print('no such wheel'); raise SystemExit(3)"
        install._run_logged([sys.executable, "-c", code], tmp_path / "made.log")
        return kind

    monkeypatch.setattr(install.Shelf, "gguf_model", fail)
    found, missing = against.gather(shelf, precisions.PRECISIONS["8 bits"], ["openvino", "llama_server"])
    assert [(peer.label, peer.python, peer.options["folder"]) for peer in found] == [
        ("openvino-auto-int8", "env/python", "models/int8")
    ]
    assert "failed: no such wheel" in missing["llama_server"]
    assert str(tmp_path / "made.log") in missing["llama_server"]


def test_a_failed_install_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def logged(command: list[str], log: Path, **_: str) -> None:
        commands.append(command)
        if "venv" in command:
            (tmp_path / "openvino" / "bin").mkdir(parents=True)
        if len(commands) == 2:
            raise install.NotInstalled("no network")

    monkeypatch.setattr(install, "_run_logged", logged)
    shelf = install.Shelf(tmp_path, "tiny")
    with pytest.raises(install.NotInstalled, match="no network"):
        shelf.python("openvino")
    assert shelf.python("openvino") == shelf.python("openvino") == str(tmp_path / "openvino" / "bin" / "python")
    assert len(commands) == 4  # venv and pip, both times; the third call finds it


def test_files_of_another_kind_are_the_same_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = gguf_files.convert(tiny_model("llama"), tmp_path / "f32.gguf", "llama")
    shelf = install.Shelf(tmp_path / "peers", str(source))
    made = Path(shelf.gguf_model("Q8_0"))
    assert made == Path(shelf.gguf_model("Q8_0")) == tmp_path / "peers" / "models" / "f32-Q8_0.gguf"
    assert shelf.gguf_model("file") == str(source)
    before, after = GgufFile(source), GgufFile(made)
    assert {info.kind for info in after.tensors.values() if len(info.shape) == 2} == {8}
    assert after.metadata["general.file_type"] == 7
    same = set(before.metadata) - {"general.file_type", "general.quantization_version"}
    assert {name: after.metadata[name] for name in same} == {name: before.metadata[name] for name in same}
    for name in before.tensors:
        values = before.dequantise(name)
        assert abs(after.dequantise(name) - values).max() <= abs(values).max() / 127
    with pytest.raises(KeyError):
        convert(source, tmp_path / "other.gguf", "Q3_Z")
    with Engine(str(made), grammar="none") as engine:
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=2)).token_ids) == 2


def test_memory_includes_children() -> None:
    now, most = memory(os.getpid())
    assert 10 < now <= most + 1
    assert memory(2**22 + 1) == (0.0, 0.0)


def test_tables_need_their_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    monkeypatch.setattr(report, "DOCS", page)
    page.write_text("no markers")
    with pytest.raises(ValueError, match=r"bench\.against"):
        report.replace(against.BEGIN, against.END, "text")
    page.write_text(f"a\n{against.BEGIN}\nold\n{against.END}\nb")
    report.replace(against.BEGIN, against.END, "new\n")
    assert page.read_text() == f"a\n{against.BEGIN}\nnew\n{against.END}\nb"


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        against.parse(["--precisions", "float32,2 bits"])
    assert "2 bits is not one of float32, 16 bits" in capsys.readouterr().err
