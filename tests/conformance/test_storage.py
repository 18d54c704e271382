"""The built-in storage and the fake pass the suite that any storage can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from phloem.plugins.storage.file import FileStorage
from phloem.testing import FakeStorage, StorageSuite


class TestFakeStorage(StorageSuite):
    plugin = FakeStorage

    def tear(self, storage: Any, name: bytes) -> None:
        storage._held[name] = storage._held[name][:-7]

    @contextmanager
    def failing(self, storage: Any) -> Iterator[None]:
        storage.faults.add("write")
        yield
        storage.faults.clear()


class TestFileStorage(StorageSuite):
    plugin = FileStorage
    options = {"path": "kv"}  # noqa: RUF012

    def tear(self, storage: Any, name: bytes) -> None:
        file = Path("kv", "blocks", name.hex()[:2], name.hex())
        file.write_bytes(file.read_bytes()[:-7])

    @contextmanager
    def failing(self, storage: Any) -> Iterator[None]:
        """The device is full after the first bytes."""
        with mock.patch("phloem.plugins.storage.file.Path.replace", side_effect=OSError(28, "No space left on device")):
            yield
