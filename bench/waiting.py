"""What a long queue adds to a step: `python -m bench.waiting [--waiting 10000] [--json PATH]`.

The real scheduler, ledger, cache and policy; the executor only counts. Prompts share a system prompt of 1,000 tokens,
100 documents of 500 tokens below it, and end in 20 tokens of their own; as many requests wait as told, however many
start. Timed is all that is done because requests wait: the queue's and the policy's methods, what the cache tells
included; milliseconds of CPU in a step.

    serving     requests start, run for 16 tokens, end, and others arrive, in a pool that holds half of the documents
    turned      in each step the system prompt, which all that wait begin with, is stored, or all of it is evicted,
                and the best eight requests are asked for
    naive       beside them, in the same states: matching all that wait against the tree again, and sorting
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.rig import Rig
from phloem.interfaces import Match
from phloem.request import Namespace, Request

SYSTEM, DOCUMENT, OWN, DOCUMENTS = 1_000, 500, 20, 100
OUTPUT, RUNNING = 16, 64
POOL = SYSTEM + DOCUMENTS // 2 * DOCUMENT + RUNNING * (OWN + OUTPUT + DOCUMENT)
VOCAB = 50_000
READ = 8
WARM = 50


class Clock:
    """Seconds of CPU inside the methods it wraps; calls of one inside another are counted once."""

    def __init__(self) -> None:
        self.spent, self._depth, self._since = 0.0, 0, 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._since = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.spent += time.thread_time() - self._since

    def wrap(self, owner: Any, *names: str) -> None:
        """Time these methods of an object."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self:
                return method(*arguments)

        return timed

    def wrap_iterator(self, owner: Any, name: str) -> None:
        """Time the steps of a generator, not what is done with what it yields."""
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Iterator[Any]:
            items = iter(method(*arguments))
            while True:
                with self:
                    item = next(items, None)
                if item is None:
                    return
                yield item

        setattr(owner, name, timed)

    def take(self) -> float:
        """Milliseconds since the last call."""
        spent, self.spent = self.spent, 0.0
        return 1e3 * spent


class Load:
    """A rig with a queue that is kept full."""

    def __init__(self, waiting: int, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(policy, pool=POOL, context=4096, max_running=RUNNING, max_tokens_per_step=4096, chunk=512)
        self.clock = Clock()
        queue, chosen = self.rig.scheduler.waiting, self.rig.scheduler.policy
        self.system = self.text(SYSTEM)
        self.documents = [self.text(DOCUMENT) for _ in range(DOCUMENTS)]
        self.waiting = waiting
        self.fill()
        self.clock.wrap(queue, "add", "remove", "park", "take_back")
        self.clock.wrap_iterator(queue, "order")
        if "listens" in chosen.capabilities:
            self.clock.wrap(chosen, "stored", "removed", "cleared")

    def text(self, length: int) -> list[int]:
        """Random tokens."""
        return self.rng.choices(range(VOCAB), k=length)

    def fill(self) -> None:
        """Requests arrive until so many wait."""
        while len(self.rig.scheduler.waiting) < self.waiting:
            self.rig.add([*self.system, *self.rng.choice(self.documents), *self.text(OWN)], OUTPUT)

    def naive(self) -> float:
        """Milliseconds to match all that wait again, and sort them."""
        cache = self.rig.ledger.cache
        start = time.thread_time()
        matched = {r: cache.peek(r.tokens, r.match_limit, r.namespace) for r in self.rig.scheduler.waiting}
        sorted(matched, key=lambda r: r.arrival * 8.0 - matched[r])
        return 1e3 * (time.thread_time() - start)

    def serving(self, steps: int) -> tuple[list[float], list[float]]:
        """Milliseconds in each step, and of the naive way in some."""
        spent, naive = [], []
        for step in range(steps + WARM):
            self.clock.take()
            self.rig.step()
            self.fill()
            spent.append(self.clock.take())
            if step % 50 == 0:
                naive.append(self.naive())
        return spent[WARM:], naive

    def turned(self, steps: int) -> tuple[list[float], list[float]]:
        """The same, with the prefix of all stored and evicted in turn."""
        for request in list(self.rig.scheduler.running):
            self.rig.scheduler.drop(request, publish=False)
        self.rig.ledger.cache.reset()
        queue, spent, naive = self.rig.scheduler.waiting, [], []
        for step in range(steps):
            self.clock.take()
            if step % 2 == 0:
                self.store(array("i", self.system))
            else:
                self.rig.ledger.cache.evict(SYSTEM)
            best: list[Request] = list(islice(queue.order(), READ))
            assert len(best) == READ
            spent.append(self.clock.take())
            if step % 50 < 2:
                naive.append(self.naive())
        return spent, naive

    def store(self, tokens: array[int]) -> None:
        """Publish a prefix that nobody leases."""
        cache, pool = self.rig.ledger.cache, self.rig.ledger.pools[0]
        slots = pool.alloc(len(tokens))
        assert slots is not None
        found: Match = cache.match(tokens, len(tokens), Namespace())
        assert found.length == 0
        lease = cache.lease(found)
        cache.release(cache.publish(tokens, len(tokens), (np.asarray(slots),), lease, Namespace()).lease)


def row(name: str, spent: list[float], naive: list[float]) -> dict[str, Any]:
    """One row of the table."""
    half, high = np.percentile(spent, [50, 99])
    figures = {"median_ms": half, "p99_ms": high, "worst_ms": max(spent), "naive_median_ms": float(np.median(naive))}
    return {"case": name, "steps": len(spent), **{key: round(float(value), 3) for key, value in figures.items()}}


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--policy", default="lpm")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = Load(options.waiting, options.policy, options.seed)
    gc.freeze()  # the prompts are no garbage of a step's
    rows = [row("serving", *load.serving(options.steps)), row("turned", *load.turned(options.steps))]
    print(f"{options.waiting:,} waiting under {options.policy}: milliseconds added to a step")
    print("".join(f"{key:>17}" for key in rows[0]))
    for figures in rows:
        print("".join(f"{value:>17}" for value in figures.values()))
    if options.json:
        options.json.write_text(json.dumps({"waiting": options.waiting, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
