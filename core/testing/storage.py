"""Conformance of kind `storage`: what is read is what was written, whatever fails in between, within a budget.

class TestMine(StorageSuite):
    plugin = MyStorage

    def tear(self, storage, name):
        ...  # cut off the end of what lies under a name, as a power failure would

    def failing(self, storage):
        ...  # a context manager within which the device takes nothing
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from ..interfaces import PluginContext
from .plugin import PluginSuite

MINE = {"model": "a", "format": 1, "groups": [[None, 96]]}
THEIRS = {**MINE, "model": "b"}
BLOCK_BYTES = 1000


class FakeStorage:
    """A dictionary. `faults` holds names of methods that raise OSError, and "torn": reads lose their last byte."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """One option."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        size: int = 1 << 20
        """Most bytes."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.faults: set[str] = set()
        self._most = options.size
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def _reach(self, what: str) -> None:
        if what in self.faults:
            raise OSError(f"{what} fails, as the test asked for")

    def holds(self, name: bytes) -> bool:
        """From memory."""
        self._reach("holds")
        return name in self._held

    def read(self, name: bytes) -> bytes | None:
        """And a use."""
        self._reach("read")
        self.touch([name])
        data = self._held.get(name)
        return data[:-1] if data is not None and "torn" in self.faults else data

    def write(self, name: bytes, data: bytes) -> None:
        """Within the budget."""
        self._reach("write")
        if len(data) > self._most:
            return
        with self._lock:
            self._held[name] = bytes(data)
            while sum(map(len, self._held.values())) > self._most:
                self._held.popitem(last=False)

    def touch(self, names: Sequence[bytes]) -> None:
        """Move to the end."""
        with self._lock:
            for name in names:
                if name in self._held:
                    self._held.move_to_end(name)

    def reject(self, name: bytes) -> None:
        """Drop it."""
        with self._lock:
            self._held.pop(name, None)

    def stats(self) -> dict[str, int]:
        """What there is."""
        with self._lock:
            return {"blocks": len(self._held), "bytes": sum(map(len, self._held.values()))}

    def close(self) -> None:
        """Nothing is open."""


def _name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _data(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


class StorageSuite(PluginSuite):
    """A storage with a budget of ten blocks or so. Its options are `options` and `size`, in a folder of its own."""

    kind = "storage"
    budget: ClassVar[Mapping[str, Any]] = {"size": 10 * BLOCK_BYTES + BLOCK_BYTES // 2}

    def open(self, identity: Mapping[str, Any] = MINE) -> Any:
        """The storage as an engine opens it."""
        extras = {"identity": dict(identity), "block_bytes": BLOCK_BYTES}
        context = PluginContext("storage", "under test", extras=extras)
        return self.plugin(self.plugin.Options(**{**self.options, **self.budget}), context)

    def make(self) -> Any:
        """See `open`."""
        return self.open()

    def tear(self, storage: Any, name: bytes) -> None:
        """Cut off the end of what lies under a name. What needs it is skipped without it."""
        pytest.skip("the suite has no tear(storage, name)")

    def failing(self, storage: Any) -> AbstractContextManager[None]:
        """Within it the device takes nothing: `write` cannot succeed. What needs it is skipped without it."""
        pytest.skip("the suite has no failing(storage)")

    @pytest.fixture(autouse=True)
    def _in_a_folder_of_its_own(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # options may name a relative path

    def test_is_made_from_its_options(self) -> None:
        """The constructor takes (options, context); after `close` the same options serve again."""
        for _ in range(2):
            self.open().close()

    def test_reads_what_was_written(self) -> None:
        """To the byte; names that were never written are absent, and a second write takes the place of the first."""
        storage = self.open()
        assert not storage.holds(_name(1))
        assert storage.read(_name(1)) is None
        for first in (10, 0, 0):
            for number in range(5):
                storage.write(_name(number), _data(first + number)[first:])
        for number in range(5):
            assert storage.holds(_name(number))
            assert storage.read(_name(number)) == _data(number)
        assert storage.stats()["blocks"] == 5
        assert 5 * BLOCK_BYTES <= storage.stats()["bytes"] < 6 * BLOCK_BYTES
        storage.close()

    def test_keeps_to_its_budget(self) -> None:
        """The least recently used go, reads and touches being uses; what is larger than all of it is not kept."""
        storage = self.open()
        for number in range(8):
            storage.write(_name(number), _data(number))
        storage.touch([_name(3), _name(99)])
        assert storage.read(_name(0)) is not None
        for number in range(8, 14):
            storage.write(_name(number), _data(number))
            assert storage.stats()["bytes"] <= self.budget["size"]
        kept = [number for number in range(14) if storage.holds(_name(number))]
        assert kept == sorted([*range(14 - len(kept) + 2, 14), 0, 3])
        assert len(kept) >= 8
        storage.write(_name(77), b"x" * (self.budget["size"] + 1))
        assert not storage.holds(_name(77))
        assert storage.stats()["bytes"] <= self.budget["size"]
        storage.close()

    def test_what_is_rejected_is_gone(self) -> None:
        """It is not found again, but may be written again."""
        storage = self.open()
        storage.write(_name(1), _data(1))
        storage.reject(_name(1))
        storage.reject(_name(2))
        assert not storage.holds(_name(1))
        assert storage.read(_name(1)) is None
        storage.write(_name(1), _data(1))
        assert storage.read(_name(1)) == _data(1)
        storage.close()

    def test_a_failed_write_leaves_nothing(self) -> None:
        """It raises OSError, nobody finds the half of it, and the rest goes on."""
        storage = self.open()
        storage.write(_name(1), _data(1))
        with self.failing(storage), pytest.raises(OSError):  # noqa: PT011
            storage.write(_name(2), _data(2))
        assert not storage.holds(_name(2))
        assert storage.read(_name(2)) is None
        assert storage.read(_name(1)) == _data(1)
        storage.write(_name(2), _data(2))
        assert storage.read(_name(2)) == _data(2)
        storage.close()

    def test_what_is_torn_does_no_harm(self) -> None:
        """It may be given as it is, since the core checks it; it may not be completed, and nothing else suffers."""
        storage = self.open()
        for number in range(3):
            storage.write(_name(number), _data(number))
        self.tear(storage, _name(1))
        assert storage.read(_name(1)) != _data(1)
        storage.reject(_name(1))
        assert [storage.read(_name(n)) for n in (0, 2)] == [_data(0), _data(2)]
        storage.close()

    def test_a_restart_finds_what_was_there(self) -> None:
        """With the same identity, and in the order of use; only storages with the capability `durable`."""
        self._needs_durable()
        storage = self.open()
        for number in range(8):
            storage.write(_name(number), _data(number))
        storage.close()
        storage = self.open()
        assert [storage.read(_name(number)) for number in range(8)] == [_data(number) for number in range(8)]
        storage.close()

    def test_another_identity_finds_nothing(self) -> None:
        """Whatever was stored under one is never seen under another."""
        self._needs_durable()
        storage = self.open()
        storage.write(_name(1), _data(1))
        storage.close()
        for identity in (THEIRS, {**MINE, "extra": 1}, {"model": "a"}):
            storage = self.open(identity)
            assert not storage.holds(_name(1))
            assert storage.read(_name(1)) is None
            storage.write(_name(2), _data(2))
            storage.close()

    def test_threads_may_meet(self) -> None:
        """One writes, one reads, one asks: nothing but whole blocks is ever seen, and the budget holds."""
        storage, wrong = self.open(), []

        def run(step: Any) -> None:
            try:
                for turn in range(300):
                    step(turn % 20)
            except Exception as error:
                wrong.append(error)

        def read(number: int) -> None:
            if (data := storage.read(_name(number))) not in (None, _data(number)):
                wrong.append(data)

        steps = (read, lambda n: storage.write(_name(n), _data(n)), lambda n: storage.holds(_name(n)))
        threads = [threading.Thread(target=run, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert storage.stats()["bytes"] <= self.budget["size"]
        storage.close()

    def _needs_durable(self) -> None:
        if "durable" not in self.plugin.capabilities:
            pytest.skip("the storage does not outlive its process")
