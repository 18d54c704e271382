"""Publishes cache events over ZeroMQ: a PUB socket for what happens, a ROUTER that answers what happened before.

The frames are those of vLLM's publisher of KV events. Published: topic, number, batch. A replay is asked for with an
empty frame and a number, and answered with (empty, number, batch) messages, then (empty, -1, empty). Numbers are 8
bytes, big-endian; batches are msgpack.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import msgspec
import zmq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from phloem.errors import PluginError
from phloem.events import BlockStored, EventBatch
from phloem.feed import Feed
from phloem.interfaces import PluginContext

log = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)


class ZmqEvents:
    """Publishes what is cached to routers: ZeroMQ, in the format of vLLM's KV events, with replays and snapshots."""

    api = 1
    capabilities: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset({"cache:sharing"})

    class Options(BaseModel):
        """Options of `events: {use: zmq}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        endpoint: str = "tcp://127.0.0.1:5557"
        """Where batches are published. Whoever can connect sees the tokens of prompts: mind whom you let."""
        replay: str = "tcp://127.0.0.1:5558"
        """Where subscribers ask for earlier batches, or for the state."""
        topic: str = ""
        """First frame of what is published."""
        tokens: bool = True
        """Send the tokens of stored blocks beside their hashes; a router that hashes prompts itself needs none."""
        history: int = Field(default=1024, ge=0)
        """Batches kept for replays; who asks for older ones gets a snapshot."""
        high_water: int = Field(default=100_000, ge=1)
        """Batches that wait for one slow subscriber; more are dropped, and it finds the gap."""

        @model_validator(mode="after")
        def _two_places(self) -> ZmqEvents.Options:
            if self.endpoint == self.replay and not self.endpoint.endswith(":*"):
                raise ValueError(f"endpoint and replay are both {self.endpoint}: each needs an address of its own")
            return self

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Binds both sockets. PluginError where an address is in use, or is none."""
        self._options = options
        self._encode = msgspec.msgpack.Encoder().encode
        self._history: deque[tuple[int, bytes]] = deque(maxlen=options.history)
        self._last = 0  # number of the last batch
        self._lock = threading.Lock()  # of these two
        self._context = zmq.Context()
        self._news: Any = self._context.socket(zmq.PUB)
        self._replay: Any = self._context.socket(zmq.ROUTER)
        self._news.setsockopt(zmq.SNDHWM, options.high_water)
        self._replay.setsockopt(zmq.SNDHWM, options.history + 2)  # one whole answer fits
        try:
            self.endpoint = _bind(self._news, "endpoint", options.endpoint)
            self.replay = _bind(self._replay, "replay", options.replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread: threading.Thread | None = None

    def start(self, feed: Feed) -> None:
        """Publish from now on, and answer."""
        self._feed = feed
        with feed.lock:
            self._last = feed.subscribe(self._publish).seq
        self._thread = threading.Thread(target=self._answer, name="phloem-events-replay", daemon=True)
        self._thread.start()
        log.info("cache events on %s, replays on %s", self.endpoint, self.replay)

    def stop(self) -> None:
        """Close the sockets; what has been published goes out first, within half a second."""
        if self._thread is None:
            self._replay.close(linger=0)
        else:
            self._feed.unsubscribe(self._publish)
        self._news.close(linger=500)
        self._context.term()  # ends the wait of the thread that answers, which closes its socket

    def _publish(self, batch: EventBatch) -> None:
        """Called on the feed's thread. Never waits: PUB drops what a slow subscriber has no room for."""
        payload = self._pack(batch)
        with self._lock:
            self._history.append((batch.seq, payload))
            self._last = batch.seq
        self._news.send_multipart([self._options.topic.encode(), batch.seq.to_bytes(8, "big"), payload])

    def _pack(self, batch: EventBatch) -> bytes:
        if not self._options.tokens:
            bare = [msgspec.structs.replace(e, token_ids=[]) if isinstance(e, BlockStored) else e for e in batch.events]
            batch = msgspec.structs.replace(batch, events=bare)
        return self._encode(batch)

    def _answer(self) -> None:
        try:
            while True:
                frames = self._replay.recv_multipart()
                if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                    log.warning("a replay was asked for with %d frames, not with an empty one and 8 bytes", len(frames))
                    continue
                for seq, payload in self._since(int.from_bytes(frames[2], "big")):
                    self._replay.send_multipart([frames[0], b"", seq.to_bytes(8, "big"), payload])
                self._replay.send_multipart([frames[0], b"", END, b""])
        except zmq.ContextTerminated:
            pass  # `stop`
        finally:
            self._replay.close(linger=0)

    def _since(self, start: int) -> list[tuple[int, bytes]]:
        """The batches from `start` on, or a snapshot: for 0, for what is not kept any more, or not numbered yet."""
        with self._lock:
            kept, after = list(self._history), self._last + 1
        if start and after - len(kept) <= start <= after:
            return kept[len(kept) - (after - start) :]
        state = self._feed.snapshot()
        return [(state.seq, self._pack(state))]


def _bind(socket: Any, option: str, address: str) -> str:
    """Bind, and say to what: a port may be `*`."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        taken = error.errno == zmq.EADDRINUSE
        raise PluginError(
            f"events.{option}: cannot listen on {address}: {'the address is in use' if taken else error.strerror}",
            hint="choose another port, or end what listens there"
            if taken
            else "expected something like tcp://127.0.0.1:5557",
        ) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
