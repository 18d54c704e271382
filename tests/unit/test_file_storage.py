"""The storage `file` on disk: what a crash, another model and another engine leave of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.plugins.storage.file import FileStorage

MINE = {"model": "a", "dtype": "float32", "format": 1}


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def opened(path: Path, identity: Any = MINE, size: int = 100_000) -> FileStorage:
    options = FileStorage.Options(path=str(path), size=size)
    return FileStorage(options, PluginContext("storage", "file", extras={"identity": identity}))


def filled(path: Path, count: int = 3) -> None:
    storage = opened(path)
    for number in range(count):
        storage.write(name(number), b"%d" % number * 100)
    storage.close()


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        ({**MINE, "model": "b"}, "was made with another model"),
        ({**MINE, "dtype": "bfloat16", "format": 2}, "was made with another dtype, format"),
    ],
)
def test_a_foreign_store_is_set_aside(tmp_path: Path, caplog: Any, identity: Any, named: str) -> None:
    """Not loaded, not deleted, and said why; so it may happen more than once."""
    filled(tmp_path)
    with caplog.at_level(logging.WARNING):
        storage = opened(tmp_path, identity)
    assert named in caplog.text
    assert "set-aside-1" in caplog.text
    assert storage.stats() == {"blocks": 0, "bytes": 0}
    storage.write(name(7), b"theirs")
    storage.close()
    assert len(list((tmp_path / "set-aside-1").glob("blocks/*/*"))) == 3
    assert json.loads((tmp_path / "set-aside-1" / "store.json").read_text()) == MINE
    back = opened(tmp_path)
    assert not back.holds(name(7))
    back.close()
    assert (tmp_path / "set-aside-2").is_dir()


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", None])
def test_a_store_that_cannot_be_read_is_set_aside(tmp_path: Path, caplog: Any, damage: str | None) -> None:
    filled(tmp_path)
    about = tmp_path / "store.json"
    about.unlink() if damage is None else about.write_text(damage)
    storage = opened(tmp_path)
    assert not storage.holds(name(0))
    storage.close()
    assert "is set aside" in caplog.text
    assert len(list((tmp_path / "set-aside-1").glob("blocks/*/*"))) == 3
    assert json.loads(about.read_text()) == MINE


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    filled(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"
    assert not list(tmp_path.glob("set-aside*"))


def test_halves_are_removed_and_strangers_ignored(tmp_path: Path) -> None:
    """A process that dies while it writes leaves a file with another name."""
    filled(tmp_path)
    folder = tmp_path / "blocks" / "00"
    (folder / (name(9).hex() + ".half")).write_bytes(b"ha")
    (folder / "README").write_text("what is this?")
    (tmp_path / "blocks" / "note").write_text("a file")
    storage = opened(tmp_path)
    assert storage.stats() == {"blocks": 3, "bytes": 300}
    storage.close()
    assert not list(folder.glob("*.half"))
    assert (folder / "README").exists()


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    filled(tmp_path, 5)
    storage = opened(tmp_path)
    for number in (4, 1, 3, 0, 2):
        storage.touch([name(number)])
        os.utime(storage._file(name(number).hex()), ns=(0, 10**18 + 10**9 * (4, 1, 3, 0, 2).index(number)))
    storage.close()
    storage = opened(tmp_path, size=250)
    assert [number for number in range(5) if storage.holds(name(number))] == [0, 2]
    storage.close()


def test_a_rejected_block_is_kept_to_be_looked_at_until_room_is_needed(tmp_path: Path) -> None:
    filled(tmp_path)
    storage = opened(tmp_path, size=350)
    storage.reject(name(1))
    bad = tmp_path / "blocks" / "00" / (name(1).hex() + ".corrupt")
    assert bad.exists()
    assert storage.stats() == {"blocks": 2, "bytes": 300}
    storage.close()
    storage = opened(tmp_path, size=350)
    assert storage.stats() == {"blocks": 2, "bytes": 300}
    storage.write(name(8), b"x" * 100)
    assert not bad.exists()
    assert all(storage.holds(name(number)) for number in (0, 2, 8))
    storage.close()


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(PluginError, match="in use by another engine"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_file_that_somebody_deleted_is_absent(tmp_path: Path) -> None:
    filled(tmp_path)
    storage = opened(tmp_path)
    for file in (tmp_path / "blocks" / "00").iterdir():
        file.unlink()
    assert storage.read(name(0)) is None
    storage.touch([name(1)])
    storage.reject(name(2))
    assert storage.stats()["bytes"] == 0
    storage.close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "kv", Path("/proc/kv")):
        with pytest.raises(PluginError, match="cannot be used"):
            opened(path)


WRITER = """
import sys
from phloem.interfaces import PluginContext
from phloem.plugins.storage.file import FileStorage

options = FileStorage.Options(path=sys.argv[1], size=10**9)
storage = FileStorage(options, PluginContext("storage", "file", extras={"identity": {"model": "a"}}))
for number in range(10**6):
    storage.write(number.to_bytes(16, "big"), bytes([number % 256]) * 300_000)
"""


def test_a_process_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    """Whatever it was doing; and its folder is free for the next."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    while sum(1 for _ in tmp_path.glob("blocks/*/*")) < 40:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    storage = opened(tmp_path, {"model": "a"}, size=10**9)
    found = [number for number in range(10**3) if storage.holds(name(number))]
    assert len(found) >= 39
    assert all(storage.read(name(number)) == bytes([number % 256]) * 300_000 for number in found)
    assert not list(tmp_path.glob("blocks/*/*.half"))
    storage.close()


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_data_is_good_whose_time_of_use_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    storage = opened(tmp_path)
    monkeypatch.setattr(os, "utime", refuse)
    assert storage.read(name(1)) == b"1" * 100
    storage.close()


def test_a_file_that_cannot_be_deleted_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not tried again before all others."""
    filled(tmp_path)
    storage = opened(tmp_path, size=300)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="not permitted"):
            storage.write(name(7), b"7" * 100)
    assert storage.stats() == {"blocks": 3, "bytes": 300}
    storage.write(name(7), b"7" * 100)
    assert storage.stats() == {"blocks": 3, "bytes": 300}
    assert [number for number in (0, 1, 2, 7) if storage.holds(name(number))] == [0, 2, 7]
    storage.close()


def test_a_block_that_is_rejected_twice_counts_once(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    for size in (100, 70):
        storage.write(name(1), b"x" * size)
        storage.reject(name(1))
    assert storage.stats() == {"blocks": 0, "bytes": 70}
    storage.close()


def test_a_folder_that_could_not_be_opened_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "_find", refuse)
        with pytest.raises(PluginError, match="cannot be used"):
            opened(tmp_path)
    opened(tmp_path).close()
