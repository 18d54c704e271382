"""What the wheel and the sdist hold: all of the package, each file once, and the same from either way of building."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = (".py", ".cpp", ".json", ".safetensors")  # the last two of heads that are shipped
PLACES = {"core": "phloem", "plugins": "phloem/plugins", "server": "phloem/server", "lang": "phloem/lang"}


def build(source: Path, out: Path, kind: str) -> Path:
    """Build one archive with the installed backend: no isolation, no network."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) of the working tree."""
    return (
        build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel"),
        build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist"),
    )


def sources(folder: str) -> set[str]:
    """Files of a source folder that are shipped, relative to it; the links to other source folders are not followed."""
    skip = ("plugins/", "server/", "lang/") if folder == "core" else ()
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    names = {path.relative_to(ROOT / folder).as_posix() for path in files}
    return {name for name in names if not name.startswith(skip or "//")}


def test_sdist_has_every_module_and_what_a_builder_needs(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames()]
    assert len(names) == len(set(names))
    for folder in PLACES:
        missing = {f"{folder}/{name}" for name in sources(folder)} - set(names)
        assert not missing
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "core/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("core/plugins", "core/server", "core/lang"))]


def test_wheel_has_every_module_once(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[0]).namelist()
    assert len(names) == len(set(names))
    expected = {f"{place}/{name}" for folder, place in PLACES.items() for name in sources(folder)}
    packed = {name for name in names if name.endswith(KINDS)}
    assert packed == expected
    assert "phloem/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_from_the_sdist_is_the_same(archives: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(archives[1]) as sdist:
        sdist.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    rebuilt = zipfile.ZipFile(build(source, tmp_path / "out", "wheel"))
    direct = zipfile.ZipFile(archives[0])
    assert {i.filename: i.CRC for i in rebuilt.infolist()} == {i.filename: i.CRC for i in direct.infolist()}
