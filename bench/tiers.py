"""Time to first token of a long prefix: computed, from the pool, from host memory, and from disk after a restart.

    python -m bench.tiers [MODEL] [--tokens 4000] [--rounds 3] [--threads 2] [--path FOLDER]

A round takes one random prompt through all of these, so that what changes on the machine meanwhile touches all alike:

    cold        an engine without tiers computes it
    cold, kept  an engine with both tiers computes it, and copies it out meanwhile
    warm        the same again: it is in the pool
    host        the pool is emptied; it comes back from host memory
    disk        the engine is closed and another one opened on the same folder
    device      so again, after the files have been dropped from the system's page cache (where the system can)

Each line is printed as it is measured: seconds to the first token, prompt tokens that were found, and bytes moved per
second where a tier gave them. Medians at the end, beside the computation's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from phloem import Engine, SamplingParams

WAYS = ("cold", "cold, kept", "warm", "host", "disk", "device")
MIB = 1024**2
FIRST = SamplingParams(max_tokens=1, temperature=0)


class Line(NamedTuple):
    """One measurement; seconds to the first token."""

    way: str
    seconds: float
    cached: int
    loaded_bytes: int


class Bench:
    """Engines on one model; `path` is the store's folder."""

    def __init__(self, model: str, tokens: int, threads: int, path: Path) -> None:
        self.model, self.tokens, self.threads, self.path = model, tokens, threads, path

    @contextmanager
    def engine(self, **tiers: Any) -> Iterator[Engine]:
        """An engine, warmed up with a text of its own: the first step of a life costs more than others."""
        with Engine(
            self.model,
            grammar="none",
            spec=[],
            cache={"use": "radix", "tokens": 2 * self.tokens + 1024, **tiers},
            engine={"threads": self.threads},
        ) as made:
            made.generate([7] * 70, FIRST)
            yield made

    def first_token(self, engine: Engine, way: str, prompt: list[int]) -> Line:
        """Run the prompt for one token."""
        before = self._loaded(engine)
        begin = time.perf_counter()
        result = engine.generate(prompt, FIRST)
        seconds = time.perf_counter() - begin
        return Line(way, seconds, result.usage.cached_tokens, self._loaded(engine) - before)

    def round(self, prompt: list[int]) -> Iterator[Line]:
        """One prompt through all ways."""
        tiers: dict[str, Any] = {"host": {"size": "4GiB"}, "disk": {"path": str(self.path), "size": "16GiB"}}
        with self.engine() as engine:
            yield self.first_token(engine, "cold", prompt)
        with self.engine(**tiers) as engine:
            yield self.first_token(engine, "cold, kept", prompt)
            yield self.first_token(engine, "warm", prompt)
            while engine.stats()["tiers"]["disk"]["backlog"]:
                time.sleep(0.05)
            engine.invoke(lambda core: core.ledger.cache.reset()).result()
            yield self.first_token(engine, "host", prompt)
        with self.engine(**tiers) as engine:
            yield self.first_token(engine, "disk", prompt)
        if self._drop_pages():
            with self.engine(**tiers) as engine:
                yield self.first_token(engine, "device", prompt)

    @staticmethod
    def _loaded(engine: Engine) -> int:
        """Bytes that tiers have given back."""
        stats = engine.stats()["tiers"]
        if stats is None:
            return 0
        spec = engine.core.info.spec
        each = spec.kv_bytes_per_token(engine.core.ledger.kv.keys[0].element_size())
        return int(stats["loaded_tokens"] * each)

    def _drop_pages(self) -> bool:
        """Have the store's files read from the device next time."""
        if not hasattr(os, "posix_fadvise"):
            return False
        os.sync()
        for file in self.path.glob("blocks/*/*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return True


def show(line: Line) -> str:
    """One measurement as text."""
    speed = f"  {line.loaded_bytes / line.seconds / MIB:6,.0f} MiB/s" if line.loaded_bytes else ""
    return f"{line.way:<10}  {line.seconds:8.3f} s  {line.cached:6,} tokens found{speed}"


def table(lines: list[Line]) -> str:
    """Medians as Markdown."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        seconds[line.way].append(line.seconds)
    cold = statistics.median(seconds["cold"])
    rows = ["| prefix | time to first token, s | of cold |", "|---|---|---|"]
    for way in WAYS:
        if way in seconds:
            median = statistics.median(seconds[way])
            rows.append(f"| {way} | {median:.3f} | {median / cold:.1%} |")
    return "\n".join(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", help="folder on the device to measure; the store is made in it, and removed")
    args = parser.parse_args()
    lines = []
    for number in range(args.rounds):
        folder = Path(tempfile.mkdtemp(prefix="phloem-tiers-", dir=args.path))
        prompt = random.Random(number).choices(range(10, 30_000), k=args.tokens)
        print(f"round {number + 1} of {args.rounds}", flush=True)
        try:
            for line in Bench(args.model, args.tokens, args.threads, folder).round(prompt):
                lines.append(line)
                print(show(line), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{args.tokens:,} tokens of {args.model}, {args.threads} threads, medians of {args.rounds} rounds\n")
    print(table(lines))


if __name__ == "__main__":
    main()
