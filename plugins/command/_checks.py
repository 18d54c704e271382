"""What `phloem doctor` looks at: one function per concern, each telling a fact and, where it is bad, a remedy."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phloem.config import Config
from phloem.registry import AUTO, KINDS, Registry

from ._survey import survey

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `warn` costs speed or a feature; `fail` means that something will not run."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str | None = None


def check_python() -> Iterator[Check]:
    """The interpreter."""
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Check("python", "fail" if old else "ok", version, "install Python 3.11 or newer" if old else None)


def check_torch() -> Iterator[Check]:
    """torch, and whether its build suits the machine."""
    try:
        import torch
    except Exception as error:  # a broken shared library is an OSError
        yield Check("torch", "fail", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    usable = torch.cuda.is_available()
    yield judge_torch(torch.__version__, torch.version.cuda, getattr(torch.version, "hip", None), gpu_vendor(), usable)


def judge_torch(version: str, cuda: str | None, hip: str | None, gpu: str | None, usable: bool) -> Check:
    """Does a build for `cuda` (or `hip`, or neither) suit a machine with a GPU of vendor `gpu` (or none)?"""
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    what = f"{version}, built for {build}; " + (f"the machine has an {gpu} GPU" if gpu else "the machine has no GPU")
    fits = "NVIDIA" if cuda else "AMD" if hip else None
    if usable or gpu == fits:
        if gpu and not usable:
            remedy = "update the GPU's driver, or install a torch build for the one you have"
            return Check("torch", "fail", f"{what}, but torch cannot use it", remedy)
        return Check("torch", "ok", what)
    if gpu is None:
        text = "a CPU build is several GB smaller: set TORCH_INDEX to PyTorch's CPU index and make install again"
        return Check("torch", "warn", what, text)
    family = "CUDA" if gpu == "NVIDIA" else "ROCm"
    text = f"the GPU stays idle: set TORCH_INDEX to PyTorch's {family} index and make install again"
    return Check("torch", "warn", what, text)


def gpu_vendor(root: Path = Path("/")) -> str | None:
    """Whose GPU the kernel sees, without asking torch: NVIDIA, AMD or none."""
    if (root / "proc/driver/nvidia/version").exists() or any((root / "dev").glob("nvidia[0-9]*")):
        return "NVIDIA"
    return "AMD" if (root / "dev/kfd").exists() else None


def check_compiler() -> Iterator[Check]:
    """A C++ compiler, from which fast CPU kernels are built once per machine."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    remedy = None if found else "install g++ (Debian: apt install g++); until then slower kernels are used"
    yield Check("compiler", "ok" if found else "warn", found or "no C++ compiler", remedy)


def check_memory(config: Config) -> Iterator[Check]:
    """Do the weights fit?"""
    free = _free_memory()
    files = _weights(config.model.path)
    if free is None or not files:
        have = f"{free / GIB:.1f} GiB free; " if free is not None else ""
        yield Check("memory", "ok", f"{have}{config.model.path} is not on this machine yet, so its size is unknown")
        return
    quant = config.quant.plugin or Registry().load("quant", AUTO["quant"][0])
    need, how = _memory_needed(files, config.model.dtype, quant)
    detail = f"{config.model.path} needs about {need / GIB:.2f} GiB ({how}), {free / GIB:.2f} GiB are free"
    if need > free:
        yield Check("memory", "fail", detail, "choose a smaller model, or keep it in fewer bits: quant, model.dtype")
    else:
        yield Check("memory", "ok", f"{detail}, the rest can hold KV")


def check_port(config: Config) -> Iterator[Check]:
    """Can the server listen?"""
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            yield Check("port", "fail", f"{host}:{port}: {error.strerror}", "choose another: server.port, or --port")
        else:
            yield Check("port", "ok", f"{host}:{port} is free")


def check_plugins(chosen: set[tuple[str, str]]) -> Iterator[Check]:
    """Each installed plugin; only one that the configuration uses can fail the report."""
    registry = Registry()
    for found in registry.found():
        if found.kind not in KINDS:
            continue
        facts = survey(found)
        name = f"plugin {found.kind}.{found.name}"
        if facts.status == "ok":
            yield Check(name, "ok", f"{found.distribution} {found.version}")
        else:
            yield Check(name, "fail" if (found.kind, found.name) in chosen else "warn", facts.status, facts.remedy)


def _free_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _weights(path: str) -> list[Path]:
    """Weight files of a local model, or of a known one that was fetched before."""
    for place in (Path(path).expanduser(), Path.home() / ".cache" / "phloem" / "models" / path):
        if place.is_file():
            return [place]
        files = sorted([*place.glob("*.safetensors"), *place.glob("*.gguf")])
        if files:
            return files
    return []


def _memory_needed(files: list[Path], dtype: str, quant: type[Any] | None) -> tuple[int, str]:
    """Bytes of the loaded weights, and how they were counted."""
    width = getattr(quant, "weight_bits", None) or (32 if dtype in ("auto", "float32") else 16)
    if files[0].suffix == ".safetensors":
        count = sum(_elements(file) for file in files)
        return int(count * width / 8), f"{count / 1e6:.0f} M weights x {width / 8:g} bytes"
    size = sum(file.stat().st_size for file in files)
    if getattr(quant, "blocks", None):
        return size, f"a file of {size / GIB:.2f} GiB, kept as it is"
    # 4.5 bits per weight is the usual size of a quantised file, and what is read from it is made anew
    return int(size * width / 4.5), f"a file of {size / GIB:.2f} GiB, taken as 4.5 bits per weight"


def _elements(file: Path) -> int:
    """Number of weights in a safetensors file, from its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for side in tensor["shape"]:
                count *= side
            total += count
    return total
