"""The built-in policies, rules and observers, and the fakes, pass the suites that any plugin can run."""

from __future__ import annotations

from typing import Any, ClassVar

from phloem.plugins.cache.eviction import Lru
from phloem.plugins.observer.jsonl import JsonlObserver
from phloem.plugins.schedule.fcfs import Fcfs
from phloem.plugins.schedule.lpm import Lpm
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


class TestLpm(ScheduleSuite):
    plugin = Lpm
    max_overtakes = 512


class TestFcfs(ScheduleSuite):
    plugin = Fcfs
    max_overtakes = 0


class TestFakePolicy(ScheduleSuite):
    plugin = FakePolicy
    max_overtakes = 0


class TestLru(EvictionSuite):
    plugin = Lru


class TestJsonl(ObserverSuite):
    plugin = JsonlObserver


class TestFakeObserver(ObserverSuite):
    plugin = FakeObserver


class TestFakeDrafter(SpecSuite):
    plugin = FakeDrafter
    options: ClassVar[dict[str, Any]] = {"script": {5: (1, 2), 16: (1, 2, 3), 30: (7,)}}


class TestFakeProcessor(SamplerSuite):
    plugin = FakeProcessor
    arguments: ClassVar[dict[str, Any]] = {"token": 1, "bias": 2.0}
