"""The bench of eviction rules: its traces ask what they say, and its figures have the bounds that they must have."""

from __future__ import annotations

import random

import pytest

from bench import eviction


@pytest.mark.parametrize("name", eviction.TRACES)
def test_traces_fit_their_pool_and_are_the_same_again(name: str) -> None:
    trace, slots = eviction.TRACES[name]
    asks = [list(trace(random.Random(3), 60, slots)) for _ in range(2)]
    assert asks[0] == asks[1]
    assert len(asks[0]) == 60
    assert max(len(ask.prompt) + ask.output for ask in asks[0]) < slots


def test_no_rule_finds_more_than_a_pool_without_bounds() -> None:
    scores = eviction.measure(["lru", "slru", "mru"], 200, seed=1)
    for name in eviction.TRACES:
        most = scores[eviction.UNBOUNDED][name]
        assert all(0 <= row[name].tokens <= most.tokens for row in scores.values())
    assert scores["slru"]["scan"].tokens > scores["lru"]["scan"].tokens
    assert scores["mru"]["loop"].tokens > scores["lru"]["loop"].tokens == 0
    table = eviction.table(scores)
    assert len(table.splitlines()) == 2 + 4
    assert f"{scores['lru']['chat'].tokens:.1%}" in table
