"""The built-in policies, rules and observers, and the fakes, pass the suites that any plugin can run."""

from __future__ import annotations

from typing import Any, ClassVar

from phloem.plugins.cache.eviction import Fifo, Filo, Lfu, Lru, Mru, Priority, Slru
from phloem.plugins.cache.eviction_cost import Cost
from phloem.plugins.observer.jsonl import JsonlObserver
from phloem.plugins.spec.ngram import NgramDrafter
from phloem.plugins.spec.suffix import SuffixDrafter
from phloem.testing import (
    EvictionSuite,
    FakeDrafter,
    FakeObserver,
    FakePolicy,
    FakeProcessor,
    ObserverSuite,
    SamplerSuite,
    ScheduleSuite,
    SpecSuite,
)


class TestFakePolicy(ScheduleSuite):
    plugin = FakePolicy
    max_overtakes = 0


class TestLru(EvictionSuite):
    plugin = Lru


class TestMru(EvictionSuite):
    plugin = Mru


class TestFifo(EvictionSuite):
    plugin = Fifo


class TestFilo(EvictionSuite):
    plugin = Filo


class TestPriority(EvictionSuite):
    plugin = Priority


class TestLfu(EvictionSuite):
    plugin = Lfu
    options: ClassVar[dict[str, Any]] = {"most": 3}


class TestSlru(EvictionSuite):
    plugin = Slru
    options: ClassVar[dict[str, Any]] = {"hits": 2, "grace": 100}


class TestCost(EvictionSuite):
    plugin = Cost
    options: ClassVar[dict[str, Any]] = {"doubles_at": 1000}


class TestJsonl(ObserverSuite):
    plugin = JsonlObserver


class TestFakeObserver(ObserverSuite):
    plugin = FakeObserver


class TestNgram(SpecSuite):
    plugin = NgramDrafter


class TestNgramAlone(SpecSuite):
    plugin = NgramDrafter
    options: ClassVar[dict[str, Any]] = {"memory": 0, "breadth": 1, "min_match": 1, "max_match": 1}


class TestSuffix(SpecSuite):
    plugin = SuffixDrafter


class TestSuffixSmall(SpecSuite):
    """So small that it forgets all the time."""

    plugin = SuffixDrafter
    options: ClassVar[dict[str, Any]] = {"memory": 8, "own": 256, "breadth": 4, "min_match": 1}


class TestFakeDrafter(SpecSuite):
    plugin = FakeDrafter
    options: ClassVar[dict[str, Any]] = {"script": {5: (1, 2), 16: (1, 2, 3), 30: (7,)}}


class TestFakeProcessor(SamplerSuite):
    plugin = FakeProcessor
    arguments: ClassVar[dict[str, Any]] = {"token": 1, "bias": 2.0}
