"""For plugin authors: per kind a conformance suite and a fake. Needs `phloem[testing]`; names load on first use.

from phloem.testing import ScheduleSuite

class TestMine(ScheduleSuite):
    plugin = MyPolicy
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

SUITES = {
    "api": "ApiSuite",
    "attention": "AttentionSuite",
    "cache": "CacheSuite",
    "component": "ComponentSuite",
    "events": "EventsSuite",
    "eviction": "EvictionSuite",
    "grammar": "GrammarSuite",
    "key": "KeySuite",
    "model": "ModelSuite",
    "observer": "ObserverSuite",
    "parser": "ParserSuite",
    "quant": "QuantSuite",
    "sampler": "SamplerSuite",
    "schedule": "ScheduleSuite",
    "spec": "SpecSuite",
    "storage": "StorageSuite",
}
_NAMES = {suite: kind for kind, suite in SUITES.items()} | {
    "FakeDrafter": "spec",
    "FakeEvictionNode": "eviction",
    "FakeObserver": "observer",
    "FakeParser": "parser",
    "FakePolicy": "schedule",
    "FakeProcessor": "sampler",
    "FakePublisher": "events",
    "FakeService": "api",
    "FakeStorage": "storage",
    "NaiveAttention": "attention",
    "ToyGrammar": "toy_grammar",
}

__all__ = ["SUITES", *_NAMES]

if "pytest" in sys.modules:  # so that a failed assertion in a suite shows its values
    sys.modules["pytest"].register_assert_rewrite(*{f"{__name__}.{module}" for module in ("plugin", *_NAMES.values())})


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'phloem.testing' has no attribute {name!r}")
    return getattr(import_module(f".{_NAMES[name]}", __name__), name)
