"""The C++ kernels under the address and undefined-behaviour sanitizers, in programs of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "attention": "attention",
    "rotated_heads": "model/native",
    "packed_product": "quant",
    "narrow_bf16": "quant",
    "narrow_int8": "quant",
    "block_product": "quant",
    "block_rounding": "quant",
}  # of plugins, by program
FLAGS = ("-std=c++17", "-O1", "-g", "-fopenmp", "-fno-sanitize-recover=all")


def machines() -> list[str]:
    """Values of `-march` that run here: the machine's own, and narrower vector units that others have."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    narrower = {"cascadelake": "avx512_vnni", "alderlake": "avx_vnni", "haswell": "avx2"}
    narrower["x86-64"] = "sse2"  # whose path is NEON's, too
    return ["native", *(name for name, flag in narrower.items() if flag in flags)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("machine", machines())
def test_nothing_is_touched_that_should_not_be(name: str, machine: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "the other tests of these kernels need one too"
    program = tmp_path / name
    source = ROOT / "tests" / "native" / f"{name}.cpp"
    folders = [f"-I{ROOT / 'plugins' / FOLDERS[name]}", f"-I{ROOT / 'core'}"]
    flags = [*FLAGS, f"-march={machine}", "-fsanitize=address,undefined", *folders]
    command = [compiler, *flags, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
