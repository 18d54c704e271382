"""Hit rates of the eviction rules over a pool that is too small: `python -m bench.eviction [--rules a,b]`.

No model: requests of made-up tokens go one after another through the radix cache as the scheduler would take them. The
traces, each of `--requests` requests:

    chat    conversations that come and go; the next turn is mostly one of the recent ones', and repeats all before it.
            Four system prompts of 200 tokens, turns of 20 to 200.
    scan    one request in four asks one of twenty shared texts of 400 tokens (priority 1), by Zipf's law; the others
            ask each a text of 400 tokens that never comes again (priority 0)
    mixed   forty texts of 800 tokens and eight of 6,400, all asked equally often
    loop    texts of 400 tokens asked in turn, one and a half times as many tokens as fit

Columns: the share of prompt tokens that were found; in brackets the share of computing time that they save, if a token
at depth 8,192 takes twice the time of the first. The row `all fits` is a pool without bounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from phloem.interfaces import PluginContext
from phloem.plugins.cache.radix import RadixCache
from phloem.pool import SlotPool
from phloem.registry import Registry, build
from phloem.request import Namespace

SPACE = Namespace()
DOUBLES_AT = 8192
UNBOUNDED = "all fits"


class Ask(NamedTuple):
    """One request: its prompt, and how many tokens of output follow it."""

    prompt: array[int]
    output: int = 0
    priority: int = 0


Trace = Callable[[random.Random, int, int], Iterator[Ask]]  # (rng, requests, slots of the pool)


class Score(NamedTuple):
    """Shares of what was asked that were found, and the time the cache took per request."""

    tokens: float
    time: float
    microseconds: float


def fresh(rng: random.Random, tokens: int) -> array[int]:
    """A text that shares nothing with another."""
    return array("i", (rng.randrange(1 << 30) for _ in range(tokens)))


def chat(rng: random.Random, requests: int, slots: int) -> Iterator[Ask]:
    """Conversations with a few system prompts."""
    systems = [fresh(rng, 200) for _ in range(4)]
    open_ones: list[array[int]] = []
    for _ in range(requests):
        if not open_ones or rng.random() < 0.2:
            open_ones.append(rng.choice(systems)[:])
        place = max(0, len(open_ones) - 1 - int(rng.expovariate(1 / 12)))
        text = open_ones.pop(place)
        text += fresh(rng, rng.randint(20, 200))
        output = rng.randint(20, 200)
        yield Ask(text[:], output)
        text += array("i", (hash((text[-1], i)) & 0x3FFFFFFF for i in range(output)))  # what the engine has written
        if len(text) < min(4000, slots // 3):
            open_ones.append(text)


def scan(rng: random.Random, requests: int, slots: int) -> Iterator[Ask]:
    """Popular texts among many that are asked once."""
    texts = [fresh(rng, 400) for _ in range(20)]
    weights = [1 / rank for rank in range(1, len(texts) + 1)]
    for i in range(requests):
        if i % 4 == 0:
            yield Ask(rng.choices(texts, weights)[0] + fresh(rng, 8), priority=1)
        else:
            yield Ask(fresh(rng, 400))


def mixed(rng: random.Random, requests: int, slots: int) -> Iterator[Ask]:
    """Long and short texts alike in popularity."""
    texts = [fresh(rng, 800) for _ in range(40)] + [fresh(rng, 6400) for _ in range(8)]
    for _ in range(requests):
        yield Ask(rng.choice(texts) + fresh(rng, 8))


def loop(rng: random.Random, requests: int, slots: int) -> Iterator[Ask]:
    """The same texts over and over."""
    texts = [fresh(rng, 400) for _ in range(max(2, slots * 3 // 2 // 400))]
    for i in range(requests):
        yield Ask(texts[i % len(texts)])


TRACES: dict[str, tuple[Trace, int]] = {"chat": (chat, 8000), "scan": (scan, 6000), "mixed": (mixed, 40_000)}
TRACES["loop"] = (loop, 6000)  # with the slots of its pool


def computing(tokens: int) -> float:
    """Time to compute a text's first tokens, in units of its first one's."""
    return tokens * (1 + tokens / 2 / DOUBLES_AT)


def play(rule: str, trace: Trace, slots: int, requests: int, seed: int) -> Score:
    """Send a trace through a cache with this rule."""
    unbounded = rule == UNBOUNDED
    pool = SlotPool(slots if not unbounded else requests * 2000 + 100_000, 1)
    context = PluginContext("cache", "radix", pools=(pool,))
    context.extras["eviction"] = build("eviction", "lru" if unbounded else rule, PluginContext("eviction", rule))
    cache = RadixCache(RadixCache.Options(), context)
    asked = found = asked_time = found_time = spent = 0.0
    for ask in trace(random.Random(seed), requests, slots):
        begin = time.perf_counter()
        matched = serve(cache, pool, ask)
        spent += time.perf_counter() - begin
        asked, found = asked + len(ask.prompt), found + matched
        asked_time, found_time = asked_time + computing(len(ask.prompt)), found_time + computing(matched)
    cache.check()
    return Score(found / asked, found_time / asked_time, spent / requests * 1e6)


def serve(cache: RadixCache, pool: SlotPool, ask: Ask) -> int:
    """One request from match to release; returns the tokens found."""
    last = ask.prompt[-1]
    text = ask.prompt + array("i", (hash((last, i)) & 0x3FFFFFFF for i in range(ask.output)))
    match = cache.match(text, len(ask.prompt) - 1, SPACE)
    lease = cache.lease(match)
    need = len(text) - match.length
    if pool.free < need:
        cache.evict(need - pool.free)
    slots = pool.alloc(need)
    assert slots is not None, "a text that does not fit into the pool"
    longer = cache.publish(text, len(text), (np.concatenate([*cache.slots(lease), slots]),), lease, SPACE).lease
    cache.used(longer, match.length, ask.priority)
    cache.release(longer)
    return match.length


def table(scores: dict[str, dict[str, Score]]) -> str:
    """Markdown: a row per rule, a column per trace."""
    names = list(next(iter(scores.values())))
    lines = [f"| rule | {' | '.join(names)} | us/request |", "|---" * (len(names) + 2) + "|"]
    for rule, row in scores.items():
        cells = [f"{score.tokens:.1%} ({score.time:.1%})" for score in row.values()]
        cost = sum(score.microseconds for score in row.values()) / len(row)
        lines.append(f"| {rule} | {' | '.join(cells)} | {cost:.0f} |")
    return "\n".join(lines)


def measure(rules: list[str], requests: int, seed: int) -> dict[str, dict[str, Score]]:
    """Every rule on every trace."""
    return {
        rule: {name: play(rule, trace, slots, requests, seed) for name, (trace, slots) in TRACES.items()}
        for rule in [*rules, UNBOUNDED]
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", help="comma-separated; default: all that are installed")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rules = options.rules.split(",") if options.rules else Registry().names("eviction")
    scores = measure(rules, options.requests, options.seed)
    print(table(scores))
    if options.json:
        rows = {rule: {name: score._asdict() for name, score in row.items()} for rule, row in scores.items()}
        options.json.write_text(json.dumps({"requests": options.requests, "seed": options.seed, "rules": rows}))


if __name__ == "__main__":
    main()
