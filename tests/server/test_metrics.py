"""/metrics: our names, vLLM's aliases, and values that agree with the engine's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

Run = Callable[..., Any]


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def test_names_and_values(run: Run) -> None:
    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        counters = engine.core.counters
        counters.prompt_tokens, counters.cached_tokens = 7, 3
        counters._sums["decode_tokens"] = 11
        counters.requests = {"stop": 2, "error": 1}
        for seconds in (0.003, 0.3, 99.0):
            counters.first_token.add(seconds)
        await client.get("/v1/models")
        await client.get("/nope/1")
        await client.get("/nope/2")
        got = samples((await client.get("/metrics")).text)
        model = ("model_name", "echo")

        def value(name: str, *labels: tuple[str, str]) -> float:
            return got[name, frozenset({model, *labels})]

        for name in ("phloem_prompt_tokens_total", "vllm:prompt_tokens_total"):
            assert value(name) == 7
        for name in ("phloem_generation_tokens_total", "vllm:generation_tokens_total"):
            assert value(name) == 11
        assert value("vllm:prefix_cache_hits_total") == 3
        assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
        assert value("vllm:kv_cache_usage_perc") == 0
        assert value("vllm:request_success_total", ("finished_reason", "stop")) == 2
        assert ("vllm:request_success_total", frozenset({model, ("finished_reason", "error")})) not in got
        assert value("phloem_requests_total", ("finished_reason", "error")) == 1
        for name in ("phloem_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
            assert value(f"{name}_bucket", ("le", "0.005")) == 1
            assert value(f"{name}_bucket", ("le", "0.5")) == 2
            assert value(f"{name}_bucket", ("le", "+Inf")) == value(f"{name}_count") == 3
            assert abs(value(f"{name}_sum") - 99.303) < 1e-9
        for name in ("inter_token_latency", "time_per_output_token", "e2e_request_latency"):
            assert value(f"vllm:{name}_seconds_count") == 0
        assert value("phloem_kv_slots", ("group", "0"), ("state", "total")) == 1000
        answers = {labels: number for (name, labels), number in got.items() if name == "phloem_http_answers_total"}
        assert answers[frozenset({("route", "/v1/models"), ("status", "200")})] == 1
        assert answers[frozenset({("route", "other"), ("status", "404")})] == 2

    run(test)


def test_tiers(run: Run) -> None:
    """Nothing without tiers; with them what the engine counts, by tier."""

    async def test(client: httpx.AsyncClient, engine: Any, gate: Any) -> None:
        assert "phloem_tier" not in (await client.get("/metrics")).text
        plain = engine.core.stats
        host = {"blocks": 3, "bytes": 4096, "stored": 5, "evicted": 2}
        disk = {"blocks": 7, "bytes": 9000, "written": 7, "read": 1, "dropped": 0, "corrupt": 1, "failures": 2}
        tiers = {"loads": 4, "loaded_tokens": 256, "failed": 1, "loading": 0, "host": host}
        engine.core.stats = lambda: {**plain(), "tiers": {**tiers, "disk": {**disk, "backlog": 11}}}
        got = samples((await client.get("/metrics")).text)

        def value(name: str, *labels: tuple[str, str]) -> float:
            return got[name, frozenset({("model_name", "echo"), *labels})]

        assert value("phloem_tier_loads_total") == 4
        assert value("phloem_tier_loaded_tokens_total") == 256
        assert value("phloem_tier_failed_loads_total") == 1
        assert value("phloem_tier_bytes", ("tier", "host")) == 4096
        assert value("phloem_tier_blocks", ("tier", "disk")) == 7
        assert value("phloem_tier_backlog", ("tier", "disk")) == 11
        for event in ("written", "read", "corrupt", "failures"):
            assert value("phloem_tier_blocks_moved_total", ("tier", "disk"), ("event", event)) == disk[event]
        assert value("phloem_tier_blocks_moved_total", ("tier", "host"), ("event", "evicted")) == 2

    run(test)
