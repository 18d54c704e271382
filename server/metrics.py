"""Prometheus metrics from the engine's counters: names of our own, and vLLM's where the meaning is the same."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from phloem.stats import LATENCY_BUCKETS_S

Stats = dict[str, Any]


class Series(NamedTuple):
    """One value of the engine's statistics, under one name or two."""

    name: str  # without the prefix "phloem_"
    help: str
    value: Callable[[Stats], float]
    alias: str | None = None


COUNTERS = (
    Series("steps", "Forward passes.", lambda s: s["steps"]),
    Series("forward_tokens", "Query tokens run, drafts included.", lambda s: s["forward_tokens"]),
    Series("prefill_tokens", "Prompt tokens actually run.", lambda s: s["prefill_tokens"]),
    Series("prompt_tokens", "Prompt tokens of requests, cached ones included.", lambda s: s["prompt_tokens"],
           "vllm:prompt_tokens"),
    Series("generation_tokens", "Tokens written.", lambda s: s["decode_tokens"], "vllm:generation_tokens"),
    Series("cached_tokens", "Prompt tokens taken from the cache.", lambda s: s["cached_tokens"],
           "vllm:prefix_cache_hits"),
    Series("draft_tokens", "Draft tokens verified.", lambda s: s["draft_tokens"], "vllm:spec_decode_num_draft_tokens"),
    Series("accepted_tokens", "Draft tokens accepted.", lambda s: s["accepted_tokens"],
           "vllm:spec_decode_num_accepted_tokens"),
    Series("scored_tokens", "Tokens of choices run to score them.", lambda s: s["scored_tokens"]),
    Series("holds_revoked", "Holds given up for want of slots.", lambda s: s["holds"]["revoked"]),
    Series("event_batches", "Batches of cache events.", lambda s: s["events"]["batches"]),
    Series("event_overflows", "Times that subscribers were told all anew.", lambda s: s["events"]["overflows"]),
    Series("evicted_tokens", "Cached tokens evicted.", lambda s: s["evicted_tokens"]),
    Series("retractions", "Running requests put back into the queue.", lambda s: s["retractions"],
           "vllm:num_preemptions"),
)  # fmt: skip

GAUGES = (
    Series("requests_running", "Requests that run.", lambda s: s["running"], "vllm:num_requests_running"),
    Series("requests_waiting", "Requests that wait.", lambda s: s["waiting"], "vllm:num_requests_waiting"),
    Series("holds", "Paths that ended calls of programs keep locked.", lambda s: s["holds"]["count"]),
    Series("held_tokens", "KV slots that they lock.", lambda s: s["holds"]["tokens"]),
    Series("pins", "Named prefixes that stay in the cache.", lambda s: s["pins"]["count"]),
    Series("pinned_tokens", "KV slots that they lock.", lambda s: s["pins"]["tokens"]),
    Series("kv_usage", "Share of KV slots that requests hold (1 is full).", lambda s: _usage(s["groups"]),
           "vllm:kv_cache_usage_perc"),
)  # fmt: skip

# key in stats["latency"], our name, vLLM's names
HISTOGRAMS = (
    ("first_token", "time_to_first_token_seconds", "Arrival to first token.", ("vllm:time_to_first_token_seconds",)),
    ("per_token", "inter_token_latency_seconds", "Time per further token.",
     ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
    ("whole", "e2e_request_latency_seconds", "Arrival to end.", ("vllm:e2e_request_latency_seconds",)),
)  # fmt: skip


def _usage(groups: list[dict[str, int]]) -> float:
    """The fullest group's share of slots that are neither free nor evictable."""
    return max((1 - (g["free"] + g["evictable"]) / g["total"] for g in groups if g["total"]), default=0.0)


class Metrics(Collector):
    """Collected at scrape time from the latest statistics; `up` and restarts also when there are none."""

    def __init__(self, read: Callable[[], tuple[str, Stats]], restarts: Callable[[], int]) -> None:
        """`read` gives the model's name and the statistics, an empty mapping before there are any."""
        self._read, self._restarts = read, restarts
        self._answers: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, route: str, status: int) -> None:
        """One HTTP answer has been sent."""
        self._answers[route, status] += 1

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        yield CounterMetricFamily("phloem_model_restarts", "Restarts of the model process.", value=self._restarts())
        answers = CounterMetricFamily("phloem_http_answers", "HTTP answers.", labels=["route", "status"])
        for (route, status), number in sorted(self._answers.items()):
            answers.add_metric([route, str(status)], number)
        yield answers
        name, stats = self._read()
        if stats:
            yield from itertools.chain(
                _plain(name, stats),
                _requests(name, stats),
                _slots(name, stats),
                _tiers(name, stats["tiers"] or {}),
                _histograms(name, stats),
            )


def _plain(model: str, stats: Stats) -> Iterator[Metric]:
    for family, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        for series in table:
            for name in (f"phloem_{series.name}", series.alias):
                if name is not None:
                    metric = family(name, series.help, labels=["model_name"])
                    metric.add_metric([model], series.value(stats))
                    yield metric


def _requests(model: str, stats: Stats) -> Iterator[Metric]:
    """Finished requests by reason; vLLM counts those that were served or aborted, not errors."""
    ours = CounterMetricFamily("phloem_requests", "Finished requests.", labels=["model_name", "finished_reason"])
    theirs = CounterMetricFamily("vllm:request_success", ours.documentation, labels=["model_name", "finished_reason"])
    for reason, number in sorted(stats["requests"].items()):
        ours.add_metric([model, reason], number)
        if reason != "error":
            theirs.add_metric([model, reason], number)
    yield from (ours, theirs)


def _slots(model: str, stats: Stats) -> Iterator[Metric]:
    slots = GaugeMetricFamily("phloem_kv_slots", "KV slots.", labels=["model_name", "group", "state"])
    for index, group in enumerate(stats["groups"]):
        for state, number in group.items():
            slots.add_metric([model, str(index), state], number)
    yield slots


def _tiers(model: str, tiers: Stats) -> Iterator[Metric]:
    """Loads, and what lies in host memory and on the disk; nothing without tiers."""
    if not tiers:
        return
    for key, name, text in (
        ("loads", "loads", "Prefixes that came back to the KV pool from a tier."),
        ("loaded_tokens", "loaded_tokens", "Their tokens."),
        ("failed", "failed_loads", "Prefixes of which a tier gave nothing after all."),
    ):
        counter = CounterMetricFamily(f"phloem_tier_{name}", text, labels=["model_name"])
        counter.add_metric([model], tiers[key])
        yield counter
    held = {
        name: GaugeMetricFamily(f"phloem_tier_{name}", text, labels=["model_name", "tier"])
        for name, text in (
            ("blocks", "Blocks of KV in a tier."),
            ("bytes", "Their bytes."),
            ("backlog", "Bytes that wait to be written."),
        )
    }
    moved = CounterMetricFamily(
        "phloem_tier_blocks_moved", "Blocks by what became of them.", labels=["model_name", "tier", "event"]
    )
    for tier in ("host", "disk"):
        for name, number in tiers.get(tier, {}).items():
            if name in held:
                held[name].add_metric([model, tier], number)
            else:
                moved.add_metric([model, tier, name], number)
    yield from (*held.values(), moved)


def _histograms(model: str, stats: Stats) -> Iterator[Metric]:
    bounds = [*(str(bound) for bound in LATENCY_BUCKETS_S), "+Inf"]
    for key, name, text, aliases in HISTOGRAMS:
        recorded = stats["latency"][key]
        buckets = list(zip(bounds, itertools.accumulate(recorded["counts"]), strict=True))
        for full in (f"phloem_{name}", *aliases):
            metric = HistogramMetricFamily(full, text, labels=["model_name"])
            metric.add_metric([model], buckets, sum_value=recorded["sum"])
            yield metric
