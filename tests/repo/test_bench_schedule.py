"""The benches of scheduling: the article's totals come out, and what is timed is what the engine does."""

from __future__ import annotations

import itertools

import pytest

from bench import orders
from bench.rig import Rig
from bench.waiting import Load


@pytest.mark.parametrize(("policy", "total"), sorted(orders.ARTICLE.items()))
def test_the_articles_totals(policy: str, total: int) -> None:
    """Three interleaved conversations against a cache too small for all."""
    assert orders.prefill(policy, orders.article(), orders.SMALLEST) == total


def test_a_pool_for_all_makes_every_order_the_same() -> None:
    totals = {orders.prefill(policy, orders.article(), orders.POOLS[-1] + 3) for policy in ("fcfs", "lpm", "lof")}
    assert totals == {orders.ARTICLE["lpm"]}


@pytest.mark.parametrize("seed", range(3))
def test_no_order_is_better_than_the_best(seed: int) -> None:
    prompts, pool = orders.small(seed)
    best = orders.best(prompts[:4], pool)
    counts = [orders.prefill("fcfs", order, pool) for order in itertools.permutations(prompts[:4])]
    assert min(counts) == best < max(counts)
    assert best <= orders.prefill("lpm", prompts[:4], pool) <= max(counts)


def test_lpm_is_near_the_best_order() -> None:
    cases = [orders.small(seed) for seed in range(8)]
    ratios = [orders.prefill("lpm", prompts[:4], pool) / orders.best(prompts[:4], pool) for prompts, pool in cases]
    assert max(ratios) <= 1.25
    assert sum(ratios) / len(ratios) <= 1.06


def test_what_waits_is_ordered_as_by_matching_all_again() -> None:
    """The states that `bench.waiting` times: the prefix of all stored and evicted in turn, and steps of serving."""
    load = Load(150, "lpm", 0)
    spent, naive = load.serving(60)
    assert len(spent) == 60
    assert min(*spent, *naive) >= 0
    same_order(load.rig)
    load.turned(1)
    same_order(load.rig)
    load.turned(2)
    same_order(load.rig)


def same_order(rig: Rig) -> None:
    cache, waiting = rig.ledger.cache, rig.scheduler.waiting
    charge = 4096 / 512
    keys = {
        r: r.arrival * charge - cache.peek(r.keys, r.match_limit, r.namespace)
        for r in waiting
        if r not in waiting._parking
    }
    assert list(waiting.order()) == sorted(keys, key=lambda r: (keys[r], r.arrival))
