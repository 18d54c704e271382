"""Blocks of KV as files of a folder: one each, written under another name first, found again after a restart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from phloem.config_sections import Size
from phloem.errors import PluginError
from phloem.interfaces import PluginContext

log = logging.getLogger(__name__)
_ABOUT, _BLOCKS, _LOCK, _HALF, _BAD = "store.json", "blocks", "lock", ".half", ".corrupt"
_NAME_LENGTH = 32  # of a file: 16 bytes in hexadecimal


class FileStorage:
    """One file for each block, in a folder that belongs to one engine at a time; the least recently used go first.

    `store.json` says what the blocks were made by. Where it is another model, or cannot be read, the store is renamed
    (`set-aside-1`, ...) and a new one begun. A file's time of modification is its last use, so that the order outlives
    the process. Blocks are not synced to the device: what a power failure tears, the checksum finds.
    """

    api = 1
    capabilities: frozenset[str] = frozenset({"durable"})

    class Options(BaseModel):
        """Options of `cache: {disk: {use: file, ...}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        path: str = Field(min_length=1)
        """Folder; it is made where it is absent, and belongs to one engine at a time."""
        size: Annotated[Size, Field(ge=1)]
        """Most bytes of blocks that it holds."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.path = Path(options.path).expanduser().resolve()
        self._most = options.size
        self._blocks = self.path / _BLOCKS
        self._guard = threading.Lock()  # of the two below; no file is touched while it is held
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, least recently used first
        self._bytes = 0
        try:
            self._open(json.loads(json.dumps(context.extras.get("identity", {}))))
        except OSError as error:
            problem = f"the folder {self.path} cannot be used: {error.strerror or error}"
            raise PluginError(problem, hint="it must be a folder that this user may write to") from error

    # --- opening

    def _open(self, identity: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise PluginError(
                f"the folder {self.path} is in use by another engine", hint="give each its own"
            ) from error
        try:
            self._begin(identity)
        except BaseException:
            self.close()
            raise

    def _begin(self, identity: Mapping[str, Any]) -> None:
        reason = self._foreign(identity)
        if reason is not None:
            aside = self._set_aside()
            log.warning("the store in %s %s: it is set aside as %s, and a new one is begun", self.path, reason, aside)
        self._blocks.mkdir(exist_ok=True)
        about = self.path / _ABOUT
        if not about.exists():
            self._write_whole(about, json.dumps(identity, indent=1).encode(), sync=True)
        self._find()

    def _foreign(self, identity: Mapping[str, Any]) -> str | None:
        """Why what is there is not this engine's; None if it is, or nothing is there."""
        about = self.path / _ABOUT
        if not about.exists():
            return "does not say what it was made by" if self._blocks.exists() else None
        try:
            theirs = json.loads(about.read_bytes())
            fields = sorted(name for name in {*identity, *theirs} if identity.get(name) != theirs.get(name))
        except (ValueError, AttributeError, TypeError):
            return "has a store.json that cannot be read"
        return f"was made with another {', '.join(fields)}" if fields else None

    def _set_aside(self) -> Path:
        number = 1
        while (aside := self.path / f"set-aside-{number}").exists():
            number += 1
        aside.mkdir()
        for name in (_ABOUT, _BLOCKS):
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
        return aside

    def _find(self) -> None:
        """The blocks of an earlier life, in the order of their use. Halves of files are removed."""
        found = []
        for folder in os.scandir(self._blocks):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                if entry.name.endswith(_HALF):
                    os.unlink(entry)
                elif len(entry.name.removesuffix(_BAD)) == _NAME_LENGTH:
                    about = entry.stat()
                    corrupt = entry.name.endswith(_BAD)
                    found.append((not corrupt, about.st_mtime_ns, entry.name, about.st_size))
        for _, _, name, size in sorted(found):
            self._sizes[name] = size
            self._bytes += size
        self._make_room(0)

    # --- the protocol

    def holds(self, name: bytes) -> bool:
        """From memory."""
        return name.hex() in self._sizes

    def read(self, name: bytes) -> bytes | None:
        """The whole file."""
        if not self.holds(name):
            return None
        try:
            data = self._file(name.hex()).read_bytes()
        except FileNotFoundError:  # somebody tidied up
            self._forget(name.hex())
            return None
        with contextlib.suppress(OSError):  # the data is good, whatever becomes of the time of its use
            self.touch([name])
        return data

    def write(self, name: bytes, data: bytes) -> None:
        """Under another name first; a rename makes it whole at once. Larger than the budget: not at all."""
        file = self._file(name.hex())
        if len(data) > self._most:
            return
        self._make_room(len(data))
        file.parent.mkdir(exist_ok=True)
        self._write_whole(file, data, sync=False)
        with self._guard:
            self._bytes += len(data) - self._sizes.pop(name.hex(), 0)
            self._sizes[name.hex()] = len(data)

    def touch(self, names: Sequence[bytes]) -> None:
        """In memory, and as the files' times."""
        for name in names:
            with self._guard:
                there = name.hex() in self._sizes
                if there:
                    self._sizes.move_to_end(name.hex())
            if there:
                try:
                    os.utime(self._file(name.hex()))
                except FileNotFoundError:
                    self._forget(name.hex())

    def reject(self, name: bytes) -> None:
        """Renamed, to be looked at; first to go when room is needed."""
        file, bad = self._file(name.hex()), name.hex() + _BAD
        size = self._forget(name.hex())
        if size is None or not file.exists():
            return
        file.rename(file.with_name(bad))
        with self._guard:
            self._bytes += size - self._sizes.pop(bad, 0)  # it may have been rejected before
            self._sizes[bad] = size
            self._sizes.move_to_end(bad, last=False)

    def stats(self) -> dict[str, int]:
        """Blocks that may be read, and bytes of all files."""
        with self._guard:
            return {"blocks": sum(not name.endswith(_BAD) for name in self._sizes), "bytes": self._bytes}

    def close(self) -> None:
        """Let another engine have it."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    # --- helpers

    def _file(self, name: str) -> Path:
        return self._blocks / name[:2] / name

    def _write_whole(self, file: Path, data: bytes, *, sync: bool) -> None:
        half = file.with_name(file.name + _HALF)
        try:
            with half.open("wb") as opened:
                opened.write(data)
                if sync:
                    opened.flush()
                    os.fsync(opened.fileno())
            half.replace(file)
        except BaseException:
            half.unlink(missing_ok=True)
            raise

    def _forget(self, name: str) -> int | None:
        """Its size; None if it is not known."""
        with self._guard:
            size = self._sizes.pop(name, None)
            self._bytes -= size or 0
        return size

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until `size` more bytes are within the budget."""
        while True:
            with self._guard:
                if self._bytes + size <= self._most or not self._sizes:
                    return
                name, gone = self._sizes.popitem(last=False)
                self._bytes -= gone
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError:  # it is still there, and counts; the next attempt begins with another one
                with self._guard:
                    self._sizes[name] = gone
                    self._bytes += gone
                raise
