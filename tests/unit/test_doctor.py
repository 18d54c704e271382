"""`phloem doctor`: each concern judged from its facts; exit code 1 where something will not run."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

import pytest
from toy_plugins import distribution

from phloem.config import load_config
from phloem.plugins.command._checks import check_memory, check_plugins, gpu_vendor, judge_torch
from phloem.plugins.command.main import main


@pytest.mark.parametrize(
    ("cuda", "hip", "gpu", "usable", "status", "words"),
    [
        (None, None, None, False, "ok", "built for CPU; the machine has no GPU"),
        ("12.8", None, None, False, "warn", "a CPU build is several GB smaller"),
        (None, None, "NVIDIA", False, "warn", "the GPU stays idle: set TORCH_INDEX to PyTorch's CUDA index"),
        (None, None, "AMD", False, "warn", "PyTorch's ROCm index"),
        ("12.8", None, "AMD", False, "warn", "PyTorch's ROCm index"),
        ("12.8", None, "NVIDIA", True, "ok", "built for CUDA 12.8; the machine has an NVIDIA GPU"),
        ("12.8", None, "NVIDIA", False, "fail", "update the GPU's driver"),
        (None, "6.2", "AMD", True, "ok", "built for ROCm 6.2"),
        (None, "6.2", "AMD", False, "fail", "update the GPU's driver"),
    ],
)
def test_torch_build_against_machine(
    cuda: str | None, hip: str | None, gpu: str | None, usable: bool, status: str, words: str
) -> None:
    check = judge_torch("2.9.0", cuda, hip, gpu, usable)
    assert check.status == status
    assert words in f"{check.detail} {check.remedy}"


def test_gpu_is_seen_without_torch(tmp_path: Path) -> None:
    assert gpu_vendor(tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert gpu_vendor(tmp_path) == "AMD"
    (tmp_path / "dev/nvidia0").touch()
    assert gpu_vendor(tmp_path) == "NVIDIA"


def weights(folder: Path, shape: list[int]) -> Path:
    """A safetensors file that is only a header."""
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_memory_is_arithmetic(tmp_path: Path) -> None:
    small = load_config(sections={"model": {"path": str(weights(tmp_path, [1000, 500]))}}, env={})
    (check,) = check_memory(small)
    assert check.status == "ok"
    assert "0 M weights x 4 bytes" in check.detail
    huge = load_config(sections={"model": {"path": str(weights(tmp_path, [10**7, 10**6]))}}, env={})
    (check,) = check_memory(huge)
    assert check.status == "fail"
    assert "needs about 37252.90 GiB (10000000 M weights x 4 bytes)" in check.detail
    assert check.remedy == "choose a smaller model, or keep it in fewer bits: quant, model.dtype"


def test_memory_depends_on_the_quant(tmp_path: Path) -> None:
    """The bits it says a weight takes; the file's size where it runs what is stored."""
    folder, file = weights(tmp_path, [10**6, 160]), tmp_path / "files" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(bytes(1 << 20))
    (tmp_path / "mine.py").write_text(
        "from phloem.plugins.quant.none import NoQuant\n"
        "class Few(NoQuant):\n    weight_bits = 5\n"
        "class AsStored(NoQuant):\n    weight_bits, blocks = 8.5, frozenset({'Q4_0'})\n"
    )
    found = []
    for quant in ("none", f"{tmp_path}/mine.py:Few", f"{tmp_path}/mine.py:AsStored"):
        for path in (folder, file):
            config = load_config(sections={"model": {"path": str(path)}, "quant": quant}, env={})
            (check,) = check_memory(config)
            found.append(check.detail.partition("(")[2].partition(")")[0])
    counted = "a file of 0.00 GiB, taken as 4.5 bits per weight"
    assert found == [
        *("160 M weights x 4 bytes", counted),
        *("160 M weights x 0.625 bytes", counted),
        *("160 M weights x 1.0625 bytes", "a file of 0.00 GiB, kept as it is"),
    ]


def test_a_broken_plugin_fails_only_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "doc_x.py").write_text("import no_such_module_xyz\nclass X:\n    api = 1\n")
    distribution(tmp_path, "phloem-x", {"phloem.spec": {"x": "doc_x:X"}}, extra={"x": "no-such-module-xyz"})
    found = {check.name: check for check in check_plugins(set())}
    assert (found["plugin spec.x"].status, found["plugin cache.radix"].status) == ("warn", "ok")
    assert found["plugin spec.x"].remedy == "pip install 'phloem-x[x]'"
    used = {check.name: check for check in check_plugins({("spec", "x")})}
    assert used["plugin spec.x"].status == "fail"


def test_report_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", "--set", f"server.port={port}"]) == 1
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
        assert checks["port"]["status"] == "fail"
        assert "Address already in use" in checks["port"]["detail"]
        assert checks["torch"]["status"] in ("ok", "warn")
        assert main(["doctor", "--set", "cache.use=radx", "--set", "server.port=0"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  config: --set cache.use=radx: cache.use: no cache plugin is named 'radx'" in out
    assert "ok    python: 3." in out
