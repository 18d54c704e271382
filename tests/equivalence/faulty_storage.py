"""A storage of files whose device misbehaves on demand: `use: .../faulty_storage.py:Faulty`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phloem.plugins.storage.file import FileStorage


class Faulty(FileStorage):
    """`faults` may be changed while it runs; reads wait for `gate`."""

    class Options(FileStorage.Options):
        """Its faults at the start: names of methods that fail, "torn", "corrupt", "empty"."""

        faults: tuple[str, ...] = ()

    def __init__(self, options: Options, context: object) -> None:
        super().__init__(options, context)  # type: ignore[arg-type]
        self.faults = set(options.faults)
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0

    def _reach(self, what: str) -> None:
        if what in self.faults:
            raise OSError(28 if what == "write" else 5, "No space left on device" if what == "write" else "I/O error")

    def holds(self, name: bytes) -> bool:
        self._reach("holds")
        return super().holds(name)

    def read(self, name: bytes) -> bytes | None:
        self.gate.wait(60)
        self.reads += 1
        self._reach("read")
        data = super().read(name)
        if data is None or "torn" in self.faults:
            return None if data is None else data[: len(data) // 2]
        if "corrupt" in self.faults:
            return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        return b"" if "empty" in self.faults else data

    def write(self, name: bytes, data: bytes) -> None:
        self._reach("write")
        super().write(name, data)

    def touch(self, names: Sequence[bytes]) -> None:
        self._reach("touch")
        super().touch(names)

    def reject(self, name: bytes) -> None:
        self._reach("reject")
        super().reject(name)

    def stats(self) -> dict[str, int]:
        self._reach("stats")
        return super().stats()
