"""What cache events cost: `python -m bench.events [--requests N] [--blocks N] [--json PATH]`.

One process, no model, a radix tree at page size 1, blocks of 64 tokens. The requests have prompts of 4,000 tokens, of
which every eight share the first half, and publish them in chunks of 512; the pool holds half of them.

    request us      CPU time of the loop's thread for the tree's part of a request, without and with a listener
    feed us/block   CPU time of the feed's thread for each block that it hashed, the known ones before a change included
    latency ms      from the cache's word to a follower's mirror over ZeroMQ on this machine, with nothing else going on
    snapshot        of a feed that knows so many blocks: time to make and to pack it, its size, time to apply it
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phloem.events import EventBatch
from phloem.feed import Feed
from phloem.interfaces import Cache, PluginContext
from phloem.mirror import Follower, Mirror
from phloem.plugins.cache.eviction import Lru
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.events.zmq import ZmqEvents
from phloem.pool import SlotPool
from phloem.request import Namespace

SPACE = Namespace()
PROMPT, CHUNK, BLOCK, SHARING = 4_000, 512, 64, 8


def prompts(count: int) -> Iterator[array[int]]:
    """Each eight share their first half."""
    for i in range(count):
        stem = i // SHARING * 1_000_000
        yield array("i", range(stem, stem + PROMPT // 2)) + array("i", range(-i * PROMPT - PROMPT // 2, -i * PROMPT))


def tree(count: int) -> tuple[Any, SlotPool]:
    """A cache that holds half of the requests' tokens."""
    pool = SlotPool(count * PROMPT // 2, 1)
    context = PluginContext("cache", "radix", pools=(pool,), page_size=1)
    context.extras["eviction"] = Lru(Lru.Options(), context)
    return RadixCache(RadixCache.Options(), context), pool


def serve(cache: Cache, pool: SlotPool, text: array[int]) -> None:
    """A request's life in the tree."""
    lease = cache.lease(cache.match(text, len(text) - 1, SPACE))
    (slots,) = cache.slots(lease)
    for end in (*range(lease.length + CHUNK, PROMPT, CHUNK), PROMPT):
        need = end - len(slots)
        if pool.free < need:
            cache.evict(need - pool.free)
        fresh = pool.alloc(need)
        assert fresh is not None, "the pool holds many requests"
        lease, kept = cache.publish(text, end, (np.concatenate([slots, fresh]),), lease, SPACE)
        slots = np.concatenate([slots, *kept])
    cache.release(lease)


def requests(count: int, *, listened: bool) -> dict[str, float]:
    """CPU seconds of both threads, as microseconds a request and a block."""
    cache, pool = tree(count)
    feed = Feed(cache, lambda work: None, block_size=BLOCK, backlog=1 << 40, medium="CPU")
    if listened:
        feed.listen()
    loop, both = time.thread_time(), time.process_time()
    for text in prompts(count):
        serve(cache, pool, text)
    loop = time.thread_time() - loop
    feed.close()
    other = time.process_time() - both - loop
    row = {"request_us": loop / count * 1e6}
    if listened:
        chunks = -(-PROMPT // 2 // CHUNK)
        hashed = count * sum((PROMPT // 2 + min(CHUNK * (i + 1), PROMPT // 2)) // BLOCK for i in range(chunks))
        row["feed_us_a_block"] = other / hashed * 1e6
    return row


def latencies(count: int) -> dict[str, float]:
    """One change after the other, each until a follower knows it."""
    publisher = ZmqEvents(
        ZmqEvents.Options(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*"), PluginContext("events", "zmq")
    )
    cache, pool = tree(count)
    feed = Feed(cache, lambda work: None, block_size=BLOCK, backlog=1 << 40, medium="CPU", publisher=publisher)
    feed.start()
    taken = []
    with Follower(publisher.endpoint, publisher.replay, check_s=60.0) as follower:
        while not follower.poll(0.1):  # until it is connected
            serve(cache, pool, next(prompts(1))[:PROMPT])
            cache.reset()
        for i in range(count):
            tokens = array("i", range(i, i + BLOCK))
            begin = time.perf_counter()
            feed.stored(Namespace(salt=str(i)), tokens, 0)
            while not follower.longest_prefix(tokens, str(i)):
                follower.poll(1.0)
            taken.append(1000 * (time.perf_counter() - begin))
    feed.close()
    return {"latency_p50_ms": statistics.median(taken), "latency_p99_ms": statistics.quantiles(taken, n=100)[98]}


def snapshot(blocks: int) -> dict[str, float]:
    """A late subscriber's first message."""
    feed = Feed(tree(1)[0], lambda work: None, block_size=BLOCK, backlog=1 << 40, medium="CPU")
    feed.listen()
    for i in range(0, blocks, PROMPT // BLOCK):
        feed.stored(Namespace(salt=str(i)), array("i", range(i, i + PROMPT)), 0)
    while feed.stats()["backlog"]:
        time.sleep(0.01)
    marks = [time.perf_counter()]
    batch = feed.snapshot()
    marks.append(time.perf_counter())
    packed = msgspec.msgpack.encode(batch)
    marks.append(time.perf_counter())
    mirror = Mirror()
    mirror.apply(msgspec.msgpack.decode(packed, type=EventBatch))
    marks.append(time.perf_counter())
    feed.close()
    make, pack, apply = (1000 * (b - a) for a, b in pairwise(marks))
    megabytes = len(packed) / 1e6
    return {"blocks": len(mirror), "make_ms": make, "pack_ms": pack, "megabytes": megabytes, "apply_ms": apply}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=16_000, help="of the snapshot: a million tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        "without": requests(args.requests, listened=False),
        "with": requests(args.requests, listened=True),
        "latency": latencies(args.requests),
        "snapshot": snapshot(args.blocks),
    }
    for name, row in result.items():
        print(f"{name:10}" + ", ".join(f"{key} {value:,.2f}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
