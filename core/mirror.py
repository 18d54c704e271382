"""For subscribers of cache events: what an engine has cached, kept up from the batches it sends.

    mirror = Follower("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    mirror.poll(timeout_s=0.1)             # as often as you like
    mirror.longest_prefix(token_ids)       # tokens that this engine need not compute

A router holds one for each engine and sends a request where the answer is highest. Nothing here needs the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .events import DEFAULT_BLOCK, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, chain, namespace_hash
from .request import Namespace


class Mirror:
    """The cached blocks of one engine, by namespace. Not thread-safe."""

    def __init__(self, block_size: int = DEFAULT_BLOCK) -> None:
        """`block_size` counts until the first event tells another."""
        self.block_size = block_size
        self.source: str | None = None
        self.seq = 0  # of the last batch
        self.gaps = 0  # batches that could not be applied for want of one before
        self.spaces: dict[bytes, set[bytes]] = {}  # `namespace_hash` -> hashes; namespaces without blocks are left out

    def __len__(self) -> int:
        """Blocks of all namespaces."""
        return sum(map(len, self.spaces.values()))

    def apply(self, batch: EventBatch) -> bool:
        """Take over a batch. False (and nothing changed) if one before it is missing: ask for a replay or snapshot.

        One that was applied before is no harm.
        """
        if batch.source == self.source and batch.seq <= self.seq:
            return True
        whole = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if not whole and (batch.source != self.source or batch.seq != self.seq + 1):
            self.gaps += 1
            return False
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.block_size = event.block_size
                self.spaces.setdefault(event.namespace, set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                left = self.spaces.get(event.namespace, set())
                left.difference_update(event.block_hashes)
                if not left:
                    self.spaces.pop(event.namespace, None)
            else:
                self.spaces.clear()
        self.source, self.seq = batch.source, batch.seq
        return True

    def longest_prefix(self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None) -> int:
        """How many tokens from the start of a prompt are cached, in whole blocks. Hashes no further than that."""
        space = namespace_hash(Namespace(salt, adapter), self.block_size)
        held = self.spaces.get(space)
        length = 0
        for key, _ in chain(tokens, self.block_size, space) if held else ():
            if key not in held:  # type: ignore[operator]
                break
            length += self.block_size
        return length


class Follower(Mirror):
    """A mirror that follows the publisher `zmq` of one engine, wherever that is. Needs pyzmq."""

    def __init__(
        self, endpoint: str, replay: str, *, topic: str = "", timeout_s: float = 5.0, check_s: float = 1.0
    ) -> None:
        """Connects to `events.endpoint` and `events.replay` of the engine, and asks for its state.

        TimeoutError if the engine does not answer within `timeout_s`. While nothing comes, the engine is asked every
        `check_s` seconds whether something should have: so the loss of a last batch is found, and a restart.
        """
        import zmq

        super().__init__()
        self._context = zmq.Context()
        self._replay, self._timeout_s, self._check_s = replay, timeout_s, check_s
        self._heard_s = 0.0  # time.monotonic() of the last sign of life
        self._decode = msgspec.msgpack.Decoder(EventBatch).decode
        self._news: Any = self._context.socket(zmq.SUB)
        self._news.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._news.connect(endpoint)
        try:
            self.sync()
        except BaseException:
            self.close()
            raise

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply what has come, waiting so long for the first; returns how many batches. Gaps are closed at once.

        TimeoutError where the engine does not answer: the mirror stays as it was, and a later call asks again.
        """
        count = 0
        while self._news.poll(0 if count else round(1000 * timeout_s)):
            count += 1
            if not self.apply(self._decode(self._news.recv_multipart()[-1])):
                self.sync()
        if count:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s >= self._check_s:
            self.sync()
        return count

    def sync(self) -> None:
        """Ask for what is missing since the last batch; for a snapshot, if that cannot be had or is another engine's.

        TimeoutError if no answer comes.
        """
        # The last one is asked for again: that it is there, and from the same source, says that this is the same life.
        if not self._ask(self.seq):
            self._ask(0)
        self._heard_s = time.monotonic()

    def _ask(self, start: int) -> bool:
        """Apply a replay from `start`; False if it is empty or doesn't follow on what is here."""
        import zmq

        with self._context.socket(zmq.DEALER) as asking:  # a new one each time: no late answer to an earlier question
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self._replay)
            asking.send_multipart([b"", start.to_bytes(8, "big")])
            count, fits = 0, True
            while asking.poll(round(1000 * self._timeout_s)):
                *_, payload = asking.recv_multipart()
                if not payload:
                    return fits and count > 0
                count += 1
                fits = self.apply(self._decode(payload)) and fits
        raise TimeoutError(f"no answer from {self._replay} within {self._timeout_s:g} s: is it the engine's replay?")

    def close(self) -> None:
        """Close the sockets."""
        self._news.close(linger=0)
        self._context.term()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
