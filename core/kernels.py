"""Compiles a plugin's C++ source once per machine, into the user's cache folder, and loads it with ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from phloem.errors import PluginError

HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "product.h"))  # sources may include them
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
TIMEOUT_S = 120


def load(source: Path, cache: Path | None = None) -> ctypes.CDLL:
    """The compiled library of `source`; a few seconds the first time, milliseconds after. Called when engines start.

    Raises PluginError saying what is missing. Loading torch first lets both share torch's OpenMP runtime.
    """
    try:
        return _load(source, cache or Path.home() / ".cache" / "phloem" / "kernels")
    except (OSError, RuntimeError) as error:  # no home, or a folder that cannot be written to or run from
        hint = "the folder .cache/phloem in the user's home must be one that may be written to"
        raise PluginError(f"{source.name} cannot be compiled and loaded: {error}", hint=hint) from error


def _load(source: Path, folder: Path) -> ctypes.CDLL:
    built = folder / f"{source.stem}-{_key(source)}.so"
    with contextlib.suppress(OSError):  # it is not there, or damaged: it is built anew
        return ctypes.CDLL(str(built))
    folder.mkdir(parents=True, exist_ok=True)
    _compile(source, built)
    return ctypes.CDLL(str(built))


def _key(source: Path) -> str:
    """Changes with the source, the flags and the processor, so that a cache folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    told = info.read_text().splitlines() if info.exists() else []
    processor = [line for line in told if line.startswith(("flags", "Features", "model name"))][:2]
    headers = [header.read_text() for header in (*HEADERS, *sorted(source.parent.glob("*.h")))]
    parts = (source.read_text(), *headers, *FLAGS, platform.machine(), platform.processor(), *processor)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(source: Path, target: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PluginError("there is no C++ compiler (g++ or clang++)", hint="install one, e.g. `apt install g++`")
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [compiler, *FLAGS, f"-I{HEADERS[0].parent}", str(source), "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise PluginError(f"{compiler} cannot compile {source.name}: {lines[0]}", hint="update the compiler")
        os.replace(name, target)  # atomic: another process never loads half a file
    except subprocess.TimeoutExpired as error:
        raise PluginError(f"{compiler} took more than {TIMEOUT_S} s for {source.name}") from error
    finally:
        Path(name).unlink(missing_ok=True)
