"""Radix tree operations per second and memory per node, at growing sizes.

python -m bench.tree [--sizes 1000,10000] [--page-size 1] [--peer PYTHON]

One process, no model, page size 1 unless told otherwise. Trees have 16 tokens a node and 8 children a node. Each
figure is the best of eight rounds of 500 operations on a tree of the given size, in CPU time:

    peek, match     a cached leaf, at a random place of the tree, per second
    insert          a publish that adds one leaf below a leased prefix
    request         all that a request costs: match, lease, slots, publish of one new leaf, use, release
    evict           one call that frees the 16 slots of the least recently used leaf
    split           a match that ends inside a node which was never cut
    bytes/node      of tree, keys, slot numbers and heap, by tracemalloc over the first 20,000 nodes
    4k match        microseconds to match a cached prefix of 4,000 tokens, and to peek at it

`--peer` is the Python of an environment with SGLang in it, whose radix cache then does the same at each size. What its
tensors keep is not in its bytes/node.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.tree_texts import BATCH, LONG, ROUNDS, RUN, Texts, rate
from phloem.batch import IntArray
from phloem.interfaces import Lease, PluginContext
from phloem.plugins.cache.eviction import Lru
from phloem.plugins.cache.radix import RadixCache
from phloem.pool import SlotPool
from phloem.request import Namespace

SPACE = Namespace()
TRACED = 20_000  # nodes whose memory is counted: tracing makes their making several times slower

COLUMNS = (
    ("nodes", "nodes"),
    *((f"{name}/s", name) for name in ("peek", "match", "insert", "request", "split", "evict")),
    ("bytes/node", "bytes_per_node"),
    ("4k match us", "match_4k_us"),
    ("4k peek us", "peek_4k_us"),
)

Row = dict[str, float]
Started = tuple["array[int]", IntArray, Lease]


class Bench:
    """A tree of `nodes` leaves and inner nodes, and the texts that lead to them."""

    def __init__(self, nodes: int, page_size: int, seed: int) -> None:
        spare = (3 * ROUNDS * BATCH * RUN + 2 * LONG) // page_size
        self.pool = SlotPool(nodes * RUN // page_size + spare, page_size)
        context = PluginContext("cache", "radix", pools=(self.pool,), page_size=page_size)
        context.extras["eviction"] = Lru(Lru.Options(), context)
        self.cache = RadixCache(RadixCache.Options(), context)
        self.texts = Texts(nodes, seed)

    def start(self, text: array[int]) -> Started:
        """Match, lease, and take slots for the rest."""
        lease = self.cache.lease(self.cache.match(text, len(text) - 1, SPACE))
        (slots,) = self.cache.slots(lease)
        fresh = self.pool.alloc(len(text) - lease.length)
        assert fresh is not None, "the pool is sized for the whole bench"
        return text, np.concatenate([slots, fresh]), lease

    def publish(self, started: Started) -> Lease:
        """Adds the new leaf."""
        text, slots, lease = started
        return self.cache.publish(text, len(text), (slots,), lease, SPACE).lease

    def request(self, text: array[int]) -> None:
        """A request's life in the tree."""
        started = self.start(text)
        found = started[2].length
        lease = self.publish(started)
        self.cache.used(lease, found, 0)
        self.cache.release(lease)

    def inserts(self, rounds: Sequence[Sequence[array[int]]]) -> float:
        """Publishes per second in the best round; what comes before and after is not timed."""
        best = 0.0
        for texts in rounds:
            started = [self.start(text) for text in texts]
            leases: list[Lease] = []
            best = max(best, rate(lambda item: leases.append(self.publish(item)), [started]))  # noqa: B023
            for lease in leases:
                self.cache.release(lease)
        return best


def measure(nodes: int, page_size: int, seed: int) -> Row:
    """All figures at one size."""
    bench = Bench(nodes, page_size, seed)
    traced = bench.texts.all[:TRACED]
    tracemalloc.start()
    for text in traced:
        bench.request(text)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    for text in bench.texts.all[TRACED:]:
        bench.request(text)
    cache = bench.cache
    row: Row = {"nodes": nodes, "page_size": page_size, "bytes_per_node": size / len(traced)}
    row["peek"] = rate(lambda t: cache.peek(t, len(t), SPACE), [bench.texts.sample() for _ in range(ROUNDS)])
    row["match"] = rate(lambda t: cache.match(t, len(t), SPACE), [bench.texts.sample() for _ in range(ROUNDS)])
    grown = bench.texts.grown()
    row["insert"] = bench.inserts(grown)
    row["request"] = rate(bench.request, bench.texts.grown())
    row["evict"] = rate(lambda _: cache.evict(RUN), grown)
    if page_size < RUN:
        row["split"] = rate(lambda t: cache.match(t, len(t) - RUN // 2, SPACE), grown)
    row.update(long_prefix(bench))
    if nodes <= 100_000:
        cache.check()
    return row


def long_prefix(bench: Bench) -> Row:
    """Microseconds to find a cached prefix of LONG tokens in one node."""
    cache = bench.cache
    text = bench.texts.long()
    bench.request(text)
    times = 200
    peek = rate(lambda t: cache.peek(t, LONG, SPACE), [[text] * times] * ROUNDS)
    match = rate(lambda t: cache.match(t, LONG, SPACE), [[text] * times] * ROUNDS)
    return {"peek_4k_us": 1e6 / peek, "match_4k_us": 1e6 / match}


def measure_peer(python: str, nodes: int, seed: int) -> Row:
    """SGLang's."""
    command = [python, "-W", "ignore", "-m", "bench.peers.sglang_tree", f"--nodes={nodes}", f"--seed={seed}"]
    told = subprocess.run([*command, f"--traced={TRACED}"], capture_output=True, text=True, check=True).stdout
    row: Row = json.loads(told.splitlines()[-1])
    return row


def line(row: Row) -> str:
    """A row of the table."""
    cells = (f"{row[key]:,.{key.endswith('us'):d}f}" if key in row else "-" for _, key in COLUMNS)
    return "".join(f"{cell:>13}" for cell in cells)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        default="1000,10000,100000,1000000",
        help="nodes, comma separated; a million take a minute or two and a gigabyte",
    )
    parser.add_argument("--page-size", type=int, default=1, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help="Python of an environment with SGLang; page size 1")
    options = parser.parse_args()
    print("".join(f"{head:>13}" for head, _ in COLUMNS))
    rows = []
    for size in options.sizes.split(","):
        rows.append(measure(int(size), options.page_size, options.seed))
        print(line(rows[-1]), flush=True)
        if options.peer:
            rows.append(measure_peer(options.peer, int(size), options.seed))
            print(line(rows[-1]), "SGLang", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
