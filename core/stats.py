"""Counters of an engine's life; they mean the same everywhere (design §3)."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import fields
from typing import Any

from .batch import StepStats
from .request import Request

# Upper bounds in seconds of the latency histograms, as in vLLM's metrics.
LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)


class Histogram:
    """Counts per bucket, their sum and number; cheap enough for every token."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Record one value in seconds."""
        self.total += value
        self.counts[bisect_left(LATENCY_BUCKETS_S, value)] += 1

    def snapshot(self) -> dict[str, Any]:
        """Plain data: bucket counts (not cumulated) and the sum of values."""
        return {"counts": list(self.counts), "sum": self.total}


class Counters:
    """Sums over all committed steps and finished requests. Written on the loop's thread."""

    _SUMS = tuple(f.name for f in fields(StepStats) if f.name not in ("step", "requests", "waiting"))

    def __init__(self) -> None:
        self.steps = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0  # of requests whose first token is out
        self.requests: dict[str, int] = {}  # by finish reason
        self.first_token = Histogram()
        self.per_token = Histogram()
        self.whole = Histogram()
        self._sums: dict[str, float] = dict.fromkeys(self._SUMS, 0)

    def add(self, stats: StepStats) -> None:
        """One step has been committed."""
        self.steps += 1
        for name in self._SUMS:
            self._sums[name] += getattr(stats, name)

    def wrote(self, request: Request, before: int) -> None:
        """A request's output grew from `before` tokens."""
        now = time.monotonic()
        written = request.output_len - before
        if before == 0:
            request.first_token_s = now
            self.first_token.add(now - request.arrival_s)
            self.cached_tokens += request.cached_tokens or 0
            self.prompt_tokens += request.prompt_len
        elif written:
            self.per_token.add((now - request.last_token_s) / written)
        request.last_token_s = now

    def finished(self, request: Request) -> None:
        """A request has ended."""
        if request.scoring is not None and request.finish_reason == "stop":
            self.wrote(request, 0)  # its scores are its first and only result
        reason = request.finish_reason or "error"
        self.requests[reason] = self.requests.get(reason, 0) + 1
        self.whole.add(time.monotonic() - request.arrival_s)

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain data."""
        return {
            "steps": self.steps,
            **self._sums,
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            "requests": dict(self.requests),
            "latency": {
                "first_token": self.first_token.snapshot(),
                "per_token": self.per_token.snapshot(),
                "whole": self.whole.snapshot(),
            },
        }
