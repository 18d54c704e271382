"""Where blocks lie below the pools: host memory with a budget of bytes, and a storage behind threads of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .storage import Storage
from .tier_blocks import Block, Layout

log = logging.getLogger(__name__)
T = TypeVar("T")
# Bytes that may wait to be written; blocks beyond are not stored, for a device that slow.
BACKLOG = 256 * 1024**2
# How long nothing is given to a device that has failed to write.
_REST_S = 5.0
_NAMES = 1 << 16  # that may wait to be touched, and that are known to be poor
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

    def close(self, until: float) -> bool:
        """End after what was submitted; False if that takes longer than until then, of time.monotonic()."""
        self._queue.put(None)
        self._thread.join(max(0.05, until - time.monotonic()))
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
    block and is counted. The storage holds `disk_bytes` in all.

    A block that is poor (see `Layout.poor`) is replaced once one comes that is not: when somebody has computed again
    what its windows had lost. Of those that the storage has from an earlier life this is known once they are read.
    """

    def __init__(self, layout: Layout, host_bytes: int, storage: Storage | None, disk_bytes: int = 1 << 62) -> None:
        self.layout, self._most, self._disk, self._storage = layout, host_bytes, disk_bytes, storage
        self._kept: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._writing: set[bytes] = set()
        self._poor: dict[bytes, None] = {}  # of the storage's blocks, as far as they were seen
        self.frozen = False  # the storage is only read
        self._backlog = 0
        self._rests_until = 0.0  # time.monotonic() up to which the device is given nothing
        self._touched: dict[bytes, None] = {}  # to be touched by the writer, in this order
        self._abandoned = False
        self.patient_until = 0.0  # time.monotonic() up to which `put` may wait for the device: at the end
        self._warned = float("-inf")
        self._lock = threading.Lock()  # of the backlog, the touches and the counters
        names = ("stored", "evicted", "uncopied", "written", "read", "dropped", "corrupt", "failures")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._writer = Worker("phloem-tier-write") if storage is not None else None

    @property
    def durable(self) -> bool:
        """What is put here is found again after the end."""
        return self._storage is not None and not self.frozen and "durable" in self._storage.capabilities

    def freeze(self, why: Iterable[str]) -> None:
        """From now on the storage is only read."""
        if self._storage is not None and not self.frozen:
            log.warning("tiers: nothing more is stored on the disk: rows of %s are lost", ", ".join(why))
            self.frozen = True

    def on_disk(self, name: bytes) -> bool:
        """The storage has it."""
        storage = self._storage
        return storage is not None and bool(self._try("look-up", lambda: storage.holds(name)))

    def get(self, name: bytes) -> Block | None:
        """A block in memory."""
        return self._kept.get(name)

    def lacks(self, names: Sequence[bytes], start: int, complete: Callable[[int], bool]) -> list[int]:
        """Which blocks of a prefix, from number `start` on, to copy out now: the last first.

        Those that are neither in the lowest tier nor on their way there, and that have a place: in a tier that holds
        less than the whole prefix its beginning stays. What a busy or failing device does not take may go to memory.
        So too those that are poor there, where `complete(number)`: what is copied now is not.
        """
        each, room = self.layout.block_bytes, self._room(self.layout.block_bytes)
        if self._storage is not None:
            numbers = range(start, min(len(names), self._disk // each))
            poor = {at for at in numbers if names[at] in self._poor and complete(at)}
            absent = [at for at in numbers if at in poor or not self.on_disk(names[at])]
            lacking = [at for at in absent if names[at] not in self._writing]
            self._drop(len(lacking) - room)
            if room or not self._most:
                return lacking[:room][::-1]
        most = self._most // (each - self.layout.head_bytes + _ENTRY_BYTES)
        kept = [(at, self._kept.get(names[at])) for at in range(start, min(len(names), most))]
        return [at for at, own in kept if own is None or (self.layout.poor(own) and complete(at))][::-1]

    def lacks_state(self, name: bytes, blocks: int) -> bool:
        """Whether to copy out now the state, of this name, after so many blocks; these must have a place as well."""
        each, rows = self.layout.state_bytes, blocks * self.layout.block_bytes
        if self._storage is not None:
            if rows + each > self._disk or name in self._writing or self.on_disk(name):
                return False
            if self._room(each):
                return True
            self._drop(1)
        return rows + each <= self._most and name not in self._kept

    def _room(self, each: int) -> int:
        """How many entries of so many bytes the device takes now."""
        now = time.monotonic()
        if self.frozen or now < self.patient_until:
            return 0 if self.frozen else 1 << 62
        return 0 if now < self._rests_until else max(0, BACKLOG - self._backlog) // each

    def _drop(self, entries: int) -> None:
        """So many, if any, are not stored, for a device that takes no more."""
        with self._lock:
            self.counts["dropped"] += max(0, entries)

    def copy(self, name: bytes, made: Callable[[], Block]) -> Block | None:
        """A block of memory, or one made now; None, counted and logged, where there is no memory to copy it to."""
        kept = self._kept.get(name)
        return self._try("copying out", made, "uncopied") if kept is None or self.layout.poor(kept) else kept

    def put(self, name: bytes, block: Block, parent: bytes, keys: array[int]) -> None:
        """Keep a block, of these keys behind the block `parent`, in every tier that lacks it."""
        self.keep(name, block)
        if (storage := self._storage) is None or self._writer is None or self.frozen or name in self._writing:
            return
        if self.on_disk(name) and (name not in self._poor or self.layout.poor(block)):
            return
        while self._backlog + block.data.nbytes > BACKLOG and time.monotonic() < self.patient_until:
            time.sleep(0.002)
        if self._room(block.data.nbytes + self.layout.head_bytes):
            with self._lock:
                self._backlog += block.data.nbytes
            self._writing.add(name)
            self._writer.submit(lambda: self._store(storage, name, block, parent, keys))

    def keep(self, name: bytes, block: Block) -> None:
        """Keep a block in memory, and let go the least recently used ones for it."""
        known = self._kept.get(name)
        if known is None or (self.layout.poor(known) and not self.layout.poor(block)):
            self._kept[name] = block
            self._bytes += block.data.nbytes - known.data.nbytes if known else block.data.nbytes + _ENTRY_BYTES
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
        if (storage := self._storage) is None or self._writer is None:
            return
        with self._lock:
            pending = bool(self._touched) or not names
            for name in backwards if len(self._touched) < _NAMES else ():
                self._touched.pop(name, None)
                self._touched[name] = None
        if not pending:
            self._writer.submit(lambda: self._touch(storage))

    def clear(self) -> None:
        """Drop what is in memory."""
        self._kept.clear()
        self._bytes = 0

    def close(self, until: float, readers: Callable[[float], object]) -> None:
        """Write what waits to be written, if that is done by then, of time.monotonic(); then end the `readers`."""
        if self._writer is not None and not self._writer.close(until):
            self._abandoned = True
            log.warning("tiers: %d bytes were not written before the end", self._backlog)
        readers(until)
        if self._storage is not None:
            self._try("close", self._storage.close)

    def stats(self) -> dict[str, dict[str, int]]:
        """Per tier `blocks`, `bytes` and counts since the start."""
        host = {"blocks": len(self._kept), "bytes": self._bytes, "failures": self.counts["uncopied"]}
        made = {"host": host | {name: self.counts[name] for name in ("stored", "evicted")}}
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
        if block is not None:
            self._seen(name, block)
        else:
            self._complain("block %s is corrupt: it is computed again", name.hex())
            self._try("reject", lambda: storage.reject(name))
        return block

    def _store(self, storage: Storage, name: bytes, block: Block, parent: bytes, keys: array[int]) -> None:
        """On the thread that writes."""

        def write() -> bool:
            storage.write(name, self.layout.seal(block, parent, keys))
            return True

        written = not self._abandoned and self._try("write", write)
        with self._lock:
            self._backlog -= block.data.nbytes
            self.counts["written"] += bool(written)
        if written:
            self._seen(name, block)
        else:
            self._rests_until = time.monotonic() + _REST_S
        self._writing.discard(name)

    def _seen(self, name: bytes, block: Block) -> None:
        """The storage has it so."""
        with self._lock:
            self._poor.pop(name, None)
            if self.layout.poor(block):
                self._poor[name] = None
                if len(self._poor) > _NAMES:
                    del self._poor[next(iter(self._poor))]

    def _touch(self, storage: Storage) -> None:
        with self._lock:
            names, self._touched = [*self._touched], {}
        self._try("touch", lambda: storage.touch(names))

    def _try(self, what: str, work: Callable[[], T], count: str = "failures") -> T | None:
        """A storage is a stranger, a device fails, memory ends: none may cost a request more than a computation."""
        try:
            return work()
        except Exception as error:
            with self._lock:
                self.counts[count] += 1
            self._complain("%s failed: %r", what, error)
            return None

    def _complain(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._warned > _SILENCE_S:
            self._warned = now
            log.warning(f"tiers: {text}", *arguments)
