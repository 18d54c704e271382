"""Where blocks lie below the pools: host memory with a budget of bytes, and a storage behind threads of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from .storage import Storage
from .tier_blocks import Block, Layout

log = logging.getLogger(__name__)
T = TypeVar("T")
# Bytes that may wait to be written; blocks beyond are not stored, for a device that slow.
_BACKLOG = 256 * 1024**2
# What the device gets at the end.
PATIENCE_S = 10.0
_ENTRY_BYTES = 256  # of a block in memory, beside its data
_SILENCE_S = 10.0  # between two lines of log about failures


class Worker:
    """A daemon thread that runs what it is given, in order. One that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Run it after what was submitted before; what it raises is logged."""
        self._queue.put(work)

    def close(self, patience_s: float) -> bool:
        """End after what was submitted; False if that takes longer."""
        self._queue.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for work in iter(self._queue.get, None):
            try:
                work()
            except Exception:
                log.exception("%s: a task failed", self._thread.name)


class Shelf:
    """Blocks by name. All methods but `read` are the loop's thread's.

    A block that is put goes to memory and, in the background, to the storage. Whatever the storage raises costs the
    block and is counted.
    """

    def __init__(self, layout: Layout, host_bytes: int, storage: Storage | None) -> None:
        self.layout, self._most, self._storage = layout, host_bytes, storage
        self._kept: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._writing: set[bytes] = set()
        self._backlog = 0
        self._abandoned = False
        self.patient_until = 0.0  # time.monotonic() up to which `put` may wait for the device: at the end
        self._warned = float("-inf")
        self._lock = threading.Lock()  # of the backlog and the counters
        names = ("stored", "evicted", "written", "read", "dropped", "corrupt", "failures")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._writer = Worker("phloem-tier-write") if storage is not None else None

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept or self.on_disk(name)

    @property
    def durable(self) -> bool:
        """What is put here is found again after the end."""
        return self._storage is not None and "durable" in self._storage.capabilities

    def on_disk(self, name: bytes) -> bool:
        """The storage has it."""
        storage = self._storage
        return storage is not None and bool(self._try("look-up", lambda: storage.holds(name)))

    def get(self, name: bytes) -> Block | None:
        """A block in memory."""
        return self._kept.get(name)

    def wants(self, name: bytes) -> bool:
        """It is not in the lowest tier yet, nor on its way there."""
        if self._storage is None:
            return name not in self._kept
        return name not in self._writing and not self.on_disk(name)

    def put(self, name: bytes, block: Block, parent: bytes, keys: array[int]) -> None:
        """Keep a block, of these keys behind the block `parent`, in every tier that lacks it."""
        self.keep(name, block)
        if self._storage is None or name in self._writing or self.on_disk(name):
            return
        while self._backlog + block.data.nbytes > _BACKLOG and time.monotonic() < self.patient_until:
            time.sleep(0.002)
        with self._lock:
            full = self._backlog + block.data.nbytes > _BACKLOG
            self.counts["dropped"] += full
            self._backlog += 0 if full else block.data.nbytes
        if not full:
            self._writing.add(name)
            self._write(lambda: self._store(name, block, parent, keys))

    def keep(self, name: bytes, block: Block) -> None:
        """Keep a block in memory, and let go the least recently used ones for it."""
        if name not in self._kept:
            self._kept[name] = block
            self._bytes += block.data.nbytes + _ENTRY_BYTES
            self.counts["stored"] += 1
        while self._bytes > self._most:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.data.nbytes + _ENTRY_BYTES
            self.counts["evicted"] += 1

    def refresh(self, names: Sequence[bytes]) -> None:
        """The blocks of one prefix are in use. Its beginning comes last, so that it goes last: the rest needs it."""
        backwards = names[::-1]
        for name in backwards:
            if name in self._kept:
                self._kept.move_to_end(name)
        if (storage := self._storage) is not None:
            self._write(lambda: self._try("touch", lambda: storage.touch(backwards)))

    def clear(self) -> None:
        """Drop what is in memory."""
        self._kept.clear()
        self._bytes = 0

    def close(self) -> None:
        """Write what waits to be written, for a while."""
        if self._writer is not None and self._storage is not None:
            if not self._writer.close(PATIENCE_S):
                self._abandoned = True
                log.warning("tiers: %d bytes were not written before the end", self._backlog)
            self._try("close", self._storage.close)

    def stats(self) -> dict[str, dict[str, int]]:
        """Per tier `blocks`, `bytes` and counts since the start."""
        host = {"blocks": len(self._kept), "bytes": self._bytes}
        made = {"host": {**host, "stored": self.counts["stored"], "evicted": self.counts["evicted"]}}
        if (storage := self._storage) is not None:
            with self._lock:
                own = {name: self.counts[name] for name in ("written", "read", "dropped", "corrupt", "failures")}
                own["backlog"] = self._backlog
            made["disk"] = {"blocks": 0, "bytes": 0, **(self._try("count", storage.stats) or {}), **own}
        return made

    # --- on the threads of the storage

    def read(self, name: bytes, parent: bytes, keys: array[int]) -> Block | None:
        """A block from the storage, checked; None if it is not to be had. Called on the thread that reads."""
        storage = self._storage
        sealed = None if storage is None else self._try("read", lambda: storage.read(name))
        if storage is None or sealed is None:
            return None
        block = self.layout.unseal(sealed, parent, keys)
        with self._lock:
            self.counts["read" if block is not None else "corrupt"] += 1
        if block is None:
            self._complain("block %s is corrupt: it is computed again", name.hex())
            self._try("reject", lambda: storage.reject(name))
        return block

    def _store(self, name: bytes, block: Block, parent: bytes, keys: array[int]) -> None:
        storage = self._storage
        assert storage is not None, "a block to store without a storage"

        def write() -> bool:
            storage.write(name, self.layout.seal(block, parent, keys))
            return True

        written = not self._abandoned and self._try("write", write)
        with self._lock:
            self._backlog -= block.data.nbytes
            self.counts["written"] += bool(written)
        self._writing.discard(name)

    def _write(self, work: Callable[[], object]) -> None:
        if self._writer is not None:
            self._writer.submit(work)

    def _try(self, what: str, work: Callable[[], T]) -> T | None:
        """A storage is a stranger and a device fails: neither may cost a request more than a computation."""
        try:
            return work()
        except Exception as error:
            with self._lock:
                self.counts["failures"] += 1
            self._complain("%s failed: %s", what, error)
            return None

    def _complain(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._warned > _SILENCE_S:
            self._warned = now
            log.warning(f"tiers: {text}", *arguments)
