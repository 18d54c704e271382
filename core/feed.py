"""Follows a cache and tells subscribers of its blocks: numbered batches, snapshots, and never a wait for the loop.

The loop's thread only queues what the cache says; a thread of the feed hashes, keeps the state and calls the
subscribers. Nothing runs, and the cache gathers nothing, until somebody subscribes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, chain, namespace_hash
from .request import Namespace

if TYPE_CHECKING:
    from .interfaces import Cache

log = logging.getLogger(__name__)
Sink = Callable[[EventBatch], None]
_PATIENCE_S = 5.0  # what subscribers get at the end; one might wait for the engine, which waits for it
_DRAIN = 256  # changes that one batch tells at most: bounds how long a snapshot waits


class Events(Protocol):
    """Kind `events`. Carries a feed's batches to subscribers elsewhere.

    The constructor opens what can be refused, such as an address, and raises PluginError. No method is called again
    after `stop`.
    """

    def start(self, feed: Feed) -> None:
        """Subscribe to the feed. Called once, on the loop's thread, before the first step."""

    def stop(self) -> None:
        """Close everything. Called once, at the engine's end."""


class _Change(NamedTuple):
    """What the cache said. `weight` is what it counts against the backlog, in bytes."""

    what: str  # "stored", "removed", "cleared", or "lost": what came before is void, and the cache is to tell all anew
    weight: int = 0
    namespace: Namespace = Namespace()
    tokens: array[int] = array("i")
    start: int = 0


class _Block(NamedTuple):
    """A cached block; `parent` is the namespace's hash for the first one."""

    parent: bytes
    tokens: bytes
    space: bytes
    adapter: str | None


class Feed:
    """The blocks that a cache holds, told in batches. Is a `CacheListener`; those methods are the loop's thread's."""

    def __init__(
        self,
        cache: Cache,
        ask: Callable[[Callable[[], object]], None],
        *,
        block_size: int,
        backlog: int,
        medium: str,
        publisher: Events | None = None,
    ) -> None:
        """`ask` runs a function on the loop's thread; `backlog` is the most bytes of unhashed tokens kept waiting.

        `block_size` is in tokens and a multiple of the cache's page size: else two branches might share a block.
        """
        self.block_size, self.medium = block_size, medium
        self.source = uuid.uuid4().hex[:16]
        self.seq = 0  # of the last batch
        self.overflows = 0
        self._cache, self._ask, self._backlog, self._publisher = cache, ask, backlog, publisher
        self._queue: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes; each is written by one thread only
        self._lost = False  # what the cache says is not heard until it has told all anew
        self._retelling = False
        self._blocks: dict[bytes, _Block] = {}  # parents first
        self._sinks: dict[Sink, Callable[[], None] | None] = {}
        self.lock = threading.RLock()  # of state, numbering and sinks
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- life, on the loop's thread

    def start(self) -> None:
        """Let the configured publisher begin."""
        if self._publisher is not None:
            self.listen()
            self._publisher.start(self)

    def listen(self) -> None:
        """Begin to follow the cache, with what it holds already. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="phloem-events", daemon=True)
            self._thread.start()
            self._tell_all()

    def close(self) -> None:
        """Tell what is left to tell, then end the subscriptions and the thread. What subscribers raise is logged."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                log.error("a subscriber of cache events does not return; the events of the end are not told")
                return
        with self.lock:
            self._closed = True
            ends, self._sinks = [end for end in self._sinks.values() if end], {}
        if self._publisher is not None:
            ends.append(self._publisher.stop)
        for end in ends:
            try:
                end()
            except Exception:
                log.exception("a subscriber of cache events did not end well")

    # --- what the cache says

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Queued, unless no block is completed by it."""
        self._offer("stored", namespace, tokens, start)

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Queued, unless no block is broken by it."""
        self._offer("removed", namespace, tokens, start)

    def cleared(self) -> None:
        """Queued."""
        if not self._lost:
            self._queue.put(_Change("cleared"))

    def _offer(self, what: str, namespace: Namespace, tokens: array[int], start: int) -> None:
        if self._lost or start // self.block_size == len(tokens) // self.block_size:
            return
        weight = 0 if self._retelling else len(tokens) * tokens.itemsize
        if self._put - self._taken + weight > self._backlog:
            self._lost = True
            self.overflows += 1
            self._queue.put(_Change("lost"))
            return
        self._put += weight
        self._queue.put(_Change(what, weight, namespace, tokens, start))

    def _tell_all(self) -> None:
        """Whatever was said before, this is the state. It does not count against the backlog, or it might never end."""
        self._lost, self._retelling = False, True
        self.cleared()
        self._cache.listen(self)
        self._retelling = False

    # --- subscribers, on any thread

    def subscribe(self, sink: Sink, end: Callable[[], None] | None = None) -> EventBatch:
        """From now on `sink` gets each batch once, in order, after the returned snapshot; `end` is called at the end.

        Both are called on the feed's thread and under its lock. A sink that raises is logged and subscribed no more.
        """
        with self.lock:
            if self._closed and end is not None:
                end()
            self._sinks[sink] = end
            return self.snapshot()

    def unsubscribe(self, sink: Sink) -> None:
        """The sink is not called again, once this has returned. Unknown ones are ignored."""
        with self.lock:
            self._sinks.pop(sink, None)

    def snapshot(self) -> EventBatch:
        """The state after the batch numbered `seq`, as one batch. O(blocks)."""
        with self.lock:
            events: list[Event] = [AllBlocksCleared()]
            last = run = None
            for key, block in self._blocks.items():
                if run is None or block.parent != last:
                    run = self._begin(block)
                    events.append(run)
                self._extend(run, key, block)
                last = key
            return self._batch(events)

    def stats(self) -> dict[str, int]:
        """Numbers for `Engine.stats`: bytes for `backlog`, counts else."""
        return {
            "batches": self.seq,
            "blocks": len(self._blocks),
            "subscribers": len(self._sinks),
            "backlog": self._put - self._taken,
            "overflows": self.overflows,
        }

    # --- the feed's own thread

    def _work(self) -> None:
        ending = False
        while not ending:
            changes = [self._queue.get()]
            while not self._queue.empty() and len(changes) < _DRAIN:
                changes.append(self._queue.get())
            ending = changes[-1] is None
            with self.lock:
                events: list[Event] = []
                for change in changes:
                    if change is not None:
                        self._taken += change.weight
                        events += self._events(change)
                if events:
                    self.seq += 1
                    self._send(self._batch(events))

    def _events(self, change: _Change) -> Iterator[Event]:
        """Change the state, and say how."""
        if change.what == "lost":
            self._ask(self._tell_all)
        elif change.what == "cleared":
            if self._blocks:
                self._blocks.clear()
                yield AllBlocksCleared()
        elif not self._lost:  # else it is void: a "lost" follows
            space = namespace_hash(change.namespace, self.block_size)
            yield from self._grown(change, space) if change.what == "stored" else self._shrunk(change, space)

    def _grown(self, change: _Change, space: bytes) -> Iterator[BlockStored]:
        parent, run = space, None
        for i, (key, tokens) in enumerate(chain(change.tokens, self.block_size, space)):
            if (i + 1) * self.block_size <= change.start or key in self._blocks:
                run = None
            else:
                block = self._blocks[key] = _Block(parent, tokens, space, change.namespace.adapter)
                if run is None:
                    run = self._begin(block)
                    yield run
                self._extend(run, key, block)
            parent = key

    def _shrunk(self, change: _Change, space: bytes) -> Iterator[BlockRemoved]:
        keys = [key for key, _ in chain(change.tokens, self.block_size, space)]
        gone = [key for key in keys[change.start // self.block_size :][::-1] if self._blocks.pop(key, None)]
        if gone:
            yield BlockRemoved(block_hashes=gone, medium=self.medium, namespace=space)

    def _begin(self, block: _Block) -> BlockStored:
        return BlockStored(
            block_hashes=[],
            parent_block_hash=None if block.parent == block.space else block.parent,
            token_ids=[],
            block_size=self.block_size,
            medium=self.medium,
            lora_name=block.adapter,
            namespace=block.space,
        )

    @staticmethod
    def _extend(run: BlockStored, key: bytes, block: _Block) -> None:
        run.block_hashes.append(key)
        width = len(block.tokens) // run.block_size
        run.token_ids += np.frombuffer(block.tokens, dtype=f"<i{width}").tolist()

    def _batch(self, events: list[Event]) -> EventBatch:
        return EventBatch(ts=time.time(), events=events, seq=self.seq, source=self.source)

    def _send(self, batch: EventBatch) -> None:
        for sink in list(self._sinks):
            try:
                sink(batch)
            except Exception:
                log.exception("a subscriber of cache events raised; it is told no more")
                self._sinks.pop(sink, None)


class Subscription:
    """An iterator over batches, the first of them a snapshot; made by `Engine.cache_events`. Use it with `with`.

    Where its reader falls behind by more than `limit` batches they are dropped, and the next one is a snapshot again.
    """

    def __init__(self, feed: Feed, limit: int) -> None:
        self.dropped = 0  # batches
        self._feed, self._limit = feed, limit
        self._changed = threading.Condition(feed.lock)
        self._closed = self._behind = False
        with feed.lock:
            self._waiting = deque([feed.subscribe(self._receive, self._end)])

    def get(self, timeout_s: float | None = None) -> EventBatch | None:
        """The next batch; None when none came in time, or when the engine or the subscription is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._behind or self._closed, timeout_s)
            if self._behind:
                self._behind = False
                return self._feed.snapshot()
            return self._waiting.popleft() if self._waiting else None

    def _receive(self, batch: EventBatch) -> None:
        if self._behind or len(self._waiting) >= self._limit:
            self.dropped += len(self._waiting) + 1
            self._waiting.clear()
            self._behind = True
        else:
            self._waiting.append(batch)
        self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the subscription; a waiting `get` returns. Idempotent."""
        self._feed.unsubscribe(self._receive)
        self._end()

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> EventBatch:
        batch = self.get()
        if batch is None:
            raise StopIteration
        return batch

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
