"""A closed-loop load on an engine of this process: so many clients, each sending its next request when one ends."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from phloem import Engine, SamplingParams

# Sums in `Engine.stats()` that split a step's time, in seconds.
STEP_TIMES = ("plan_s", "build_s", "forward_s", "sample_s", "commit_s")
COUNTERS = ("steps", "forward_tokens", "prefill_tokens", "cached_tokens", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True)
class Shape:
    """Requests of one run: `prefix` tokens all share, `input` of their own, `output` written. Lengths in tokens."""

    requests: int
    input: int
    output: int
    prefix: int = 0


@dataclass
class Times:
    """What the clients saw, in seconds."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def prompts(shape: Shape, vocabulary: Sequence[int], seed: int) -> list[list[int]]:
    """Random token ids; the same for the same seed."""
    source = random.Random(seed)
    shared = source.choices(vocabulary, k=shape.prefix)
    return [shared + source.choices(vocabulary, k=shape.input) for _ in range(shape.requests)]


def run(engine: Engine, work: list[list[int]], output: int, concurrency: int) -> dict[str, float]:
    """Send `work` through `concurrency` clients; rates, latencies in milliseconds, and counters of the run."""
    before = engine.stats()
    times = Times()
    begin = time.perf_counter()
    asyncio.run(_clients(engine, iter(work), output, concurrency, times))
    elapsed = time.perf_counter() - begin
    after = engine.stats()
    written = len(work) * output
    read = sum(len(prompt) for prompt in work)
    return {
        "concurrency": concurrency,
        "elapsed_s": elapsed,
        "output_tok_s": written / elapsed,
        "total_tok_s": (written + read) / elapsed,
        "requests_s": len(work) / elapsed,
        **_latencies("ttft", times.first_token),
        **_latencies("itl", times.between_tokens),
        **_latencies("e2e", times.whole),
        **{name: after[name] - before[name] for name in (*COUNTERS, *STEP_TIMES)},
    }


async def _clients(engine: Engine, work: Iterator[list[int]], output: int, concurrency: int, times: Times) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

    async def client() -> None:
        for prompt in work:  # the clients share one iterator: whoever is free takes the next
            await _request(engine, prompt, params, times)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def _request(engine: Engine, prompt: list[int], params: SamplingParams, times: Times) -> None:
    begin = last = time.perf_counter()
    first = True
    async for delta in engine.astream(prompt, params):
        now = time.perf_counter()
        count = len(delta.token_ids)
        if first and count:
            times.first_token.append(now - begin)
            first, count = False, count - 1
        times.between_tokens += [(now - last) / max(1, count)] * count
        last = now
    times.whole.append(time.perf_counter() - begin)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest of the values that at least a share `q` of them does not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def _latencies(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds; nothing of no values (one-token outputs have no gaps)."""
    if not seconds:
        return {}
    return {f"{name}_p{round(100 * q)}_ms": 1e3 * quantile(seconds, q) for q in (0.5, 0.99)}
