"""Eviction rules over the radix cache: their order against a naive scan, uses and priorities against a naive count."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem import Engine, SamplingParams
from phloem.config import load_config
from phloem.errors import ConfigError
from phloem.interfaces import Lease, PluginContext
from phloem.plugins.cache.eviction import Fifo, Filo, Lfu, Lru, Mru, Priority, Slru
from phloem.plugins.cache.eviction_cost import Cost
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.cache.swa import SwaCache
from phloem.pool import SlotPool
from phloem.registry import Registry
from phloem.request import Namespace
from phloem.testing import CacheSuite, FakeEvictionNode

RULES: list[tuple[type[Any], dict[str, Any]]] = [
    *((rule, {}) for rule in (Lru, Mru, Fifo, Filo, Priority)),
    (Lfu, {"most": 2}),
    (Slru, {"hits": 1, "grace": 12}),
    (Cost, {"doubles_at": 7}),
]
HERE = Namespace()


@dataclass
class Running:
    """A request that holds a lease."""

    tokens: array[int]
    priority: int
    found: int
    lease: Lease


class Bench:
    """Requests against a radix cache, beside a count per page of who used it."""

    def __init__(self, rule: type[Any], options: dict[str, Any], page: int = 1, pages: int = 24) -> None:
        self.page, self.pool = page, SlotPool(pages, page)
        self.rule = rule(rule.Options(**options), PluginContext("eviction", "x"))
        context = PluginContext("cache", "radix", pools=(self.pool,), page_size=page)
        context.extras["eviction"] = self.rule
        self.cache = RadixCache(RadixCache.Options(), context)
        self.hits: dict[bytes, int] = {}
        self.priority: dict[bytes, int] = {}
        self.order: list[bytes] = []  # prefixes as they were evicted

    def start(self, tokens: array[int], priority: int = 0) -> Running:
        for _ in range(3):  # one that waits for room looks again in every step
            match = self.cache.match(tokens, len(tokens) - 1, HERE)
        return Running(tokens, priority, match.length, self.cache.lease(match))

    def end(self, request: Running) -> None:
        """Compute what fits, publish and leave."""
        want = len(request.tokens) // self.page * self.page - request.lease.length
        while self.pool.free < want and self.evict_page():
            pass
        new = min(want, self.pool.free)
        fresh = self.pool.alloc(new)
        assert fresh is not None
        slots = np.concatenate([*self.cache.slots(request.lease), fresh])
        length = request.lease.length + new
        lease = self.cache.publish(request.tokens, length, (slots,), request.lease, HERE).lease
        self.cache.used(lease, request.found, request.priority)
        self.cache.release(lease)
        for end in range(self.page, length + 1, self.page):
            prefix = request.tokens[:end].tobytes()
            self.hits[prefix] = self.hits.get(prefix, 0) + (end <= request.found)
            self.priority[prefix] = max(self.priority.get(prefix, -(10**9)), request.priority)

    def serve(self, *tokens: int, priority: int = 0) -> None:
        self.end(self.start(array("i", tokens), priority))

    def evict_page(self) -> bool:
        """Evict one page, and check that it was the end of a leaf that a scan of the whole tree would have chosen."""
        leaves = [node for node in self.cache._tree.nodes() if node.is_candidate]
        best = min((self.rule.key(node) for node in leaves), default=None)
        allowed = {self.prefix(node) for node in leaves if self.rule.key(node) == best}
        before = {self.prefix(node) for node in leaves}
        if not self.cache.evict(1):
            assert not leaves
            return False
        gone = before - set(self.pages())
        assert len(gone) == 1
        assert gone <= allowed, "another leaf went than the one with the smallest key"
        prefix = gone.pop()
        self.order.append(prefix)
        self.hits.pop(prefix, None)
        self.priority.pop(prefix, None)
        return True

    def prefix(self, node: Any) -> bytes:
        return bytes(self.cache._tree.text(node).tobytes())

    def pages(self) -> Iterator[bytes]:
        """Every cached prefix of whole pages."""
        for node in self.cache._tree.nodes():
            text = self.cache._tree.text(node)
            for end in range(node.end - node.tokens + self.page, node.end + 1, self.page):
                yield text[:end].tobytes()

    def audit(self) -> None:
        self.cache.check()
        for node in self.cache._tree.nodes():
            text = self.cache._tree.text(node)
            for end in range(node.end - node.tokens + self.page, node.end + 1, self.page):
                page = text[:end].tobytes()
                assert node.hits == self.hits.get(page, 0), f"{node.hits} hits of {list(text[:end])}"
                if page in self.priority:  # else nobody who computed it has left yet
                    assert node.priority == self.priority[page]

    def left(self) -> set[int]:
        """First tokens of what is cached."""
        return {child.key[0] for root in self.cache._tree.roots.values() for child in root.children.values()}


_text = st.lists(st.integers(0, 1), min_size=1, max_size=14)
_step = st.one_of(
    st.tuples(st.just("start"), _text, st.integers(-2, 2)),
    st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.just(0)),
)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(("rule", "options"), RULES, ids=[rule.__name__ for rule, _ in RULES])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(_step, max_size=40))
def test_order_is_that_of_a_scan(rule: type[Any], options: dict[str, Any], page: int, steps: list[Any]) -> None:
    bench = Bench(rule, options, page)
    running: list[Running] = []
    for what, value, priority in steps:
        if what == "start" and len(running) < 4:
            running.append(bench.start(array("i", value), priority))
        elif what == "end" and running:
            bench.end(running.pop(value % len(running)))
        elif what == "evict":
            for _ in range(value):
                bench.evict_page()
        bench.audit()
    for request in running:
        bench.end(request)
    while bench.evict_page():
        bench.audit()
    assert bench.pool.free == bench.pool.total


@pytest.mark.parametrize("cache", [RadixCache, SwaCache])
@pytest.mark.parametrize(("rule", "options"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_any_history_under_any_rule(rule: type[Any], options: dict[str, Any], cache: type[Any]) -> None:
    """The cache suite's random histories, heaps checked after each step, with the window's own heap as well."""

    class Suite(CacheSuite):
        plugin = cache
        examples, steps = 6, 30

        def make(self, context: PluginContext) -> Any:
            context.extras["eviction"] = rule(rule.Options(**options), PluginContext("eviction", "x"))
            return cache(cache.Options(), context)

    Suite()._histories(4, (None, 6) if cache is SwaCache else (None,))


# --- each rule's own order, with three texts of which one has to go


def three(rule: type[Any], **options: Any) -> Bench:
    """Text 1 is used three times, then 2 once; 3 is used last, and twice."""
    bench = Bench(rule, options, pages=12)
    for first, priority in ((1, 0), (1, 5), (1, 0), (2, 0), (3, 0), (3, -1)):
        bench.serve(first, 7, 7, 7, priority=priority)
    return bench


@pytest.mark.parametrize(
    ("rule", "options", "kept"),
    [
        (Lru, {}, {2, 3}),
        (Mru, {}, {1, 2}),
        (Fifo, {}, {2, 3}),
        (Filo, {}, {1, 2}),
        (Lfu, {}, {1, 3}),
        (Lfu, {"most": 1}, {1, 3}),
        (Slru, {}, {1, 3}),
        (Slru, {"hits": 9}, {2, 3}),
        (Priority, {}, {1, 3}),
        (Cost, {}, {1, 3}),
    ],
)
def test_who_goes_first(rule: type[Any], options: dict[str, Any], kept: set[int]) -> None:
    bench = three(rule, **options)
    bench.cache.evict(4)
    assert bench.left() == kept


def test_a_scan_does_not_push_out_what_is_shared() -> None:
    for rule, survives in ((Lru, False), (Slru, True), (Lfu, True), (Cost, True)):
        bench = Bench(rule, {}, pages=24)
        for _ in range(5):
            bench.serve(1, 1, 1, 1, 1, 1, 1, 1)
        for first in range(2, 9):
            bench.serve(first, 1, 1, 1, 1, 1, 1, 1)
        assert (1 in bench.left()) == survives, rule.__name__


@pytest.mark.parametrize("rule", [Cost, Slru])
def test_nothing_stays_for_ever(rule: type[Any]) -> None:
    bench = Bench(rule, {"grace": 40} if rule is Slru else {}, pages=24)
    for _ in range(10):
        bench.serve(1, 1, 1, 1, 1, 1, 1, 1)
    for first in range(2, 200):
        if 1 not in bench.left():
            break
        bench.serve(first, 1, 1, 1, 1, 1, 1, 1)
    assert 5 < first < 150, "popular once, unused since"


def test_what_lies_deeper_is_kept_longer() -> None:
    rule = Cost(Cost.Options(doubles_at=100), PluginContext("eviction", "cost"))
    shallow, deep = FakeEvictionNode(tokens=10, end=10), FakeEvictionNode(tokens=10, end=1000)
    assert rule.key(deep) == pytest.approx(10.95)
    assert rule.key(shallow) == pytest.approx(1.05)
    assert rule.key(FakeEvictionNode(tokens=10, end=10, hits=10)) > rule.key(deep), "uses count as much as cost"


def test_uses_lift_the_whole_path_but_not_what_was_computed() -> None:
    bench = Bench(Lru, {})
    bench.serve(1, 2, 3)
    bench.serve(1, 2, 3, 4, 5)
    hits = {node.end: node.hits for node in bench.cache._tree.nodes()}
    assert hits == {3: 1, 5: 0}


def test_priorities_come_from_the_requests(tiny_model: Callable[[str], Path]) -> None:
    """A text that a request of high priority used outlives later ones of none, in an engine."""
    sections: dict[str, Any] = {"engine": {"threads": 1, "check": True}, "schedule": "priority"}
    texts = [[first, *range(30, 69)] for first in range(3, 9)]
    params = SamplingParams(max_tokens=1, temperature=0)
    for rule, kept in (("priority", 39), ("lru", 0)):
        with Engine(str(tiny_model("llama")), cache={"tokens": 128, "eviction": rule}, **sections) as engine:
            engine.generate(texts[0], params, priority=7)
            for text in texts[1:]:
                engine.generate(text, params)
            assert engine.generate(texts[0], params).usage.cached_tokens == kept, rule


BROKEN = """
from pydantic import BaseModel, ConfigDict

class Broken:
    api = 1
    capabilities = frozenset()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options, context):
        pass

    def key(self, node):
        return -node.last_access if not node.hits else 1 / 0
"""


def test_a_broken_rule_costs_no_request(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It raises when a request has ended, where nobody is left to be told of it."""
    (tmp_path / "broken.py").write_text(BROKEN)
    with Engine(
        str(tiny_model("llama")),
        cache={"tokens": 128, "eviction": f"{tmp_path}/broken.py:Broken"},
        engine={"threads": 1, "check": True},
    ) as engine:
        for i in range(9):
            prompt = [5 + i // 3, *range(30, 69)]
            assert len(engine.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
        assert engine.stats()["evicted_tokens"] > 0


def test_priority_needs_a_policy_that_takes_priorities(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("schedule: lpm\ncache: {eviction: priority}\n")
    with pytest.raises(ConfigError, match=r"engine.yaml:2:9: cache.eviction: 'priority' needs schedule with priority"):
        load_config(str(file), env={})


def test_rules_are_chosen_by_name_and_their_options_are_checked(tmp_path: Any) -> None:
    assert {"lru", "mru", "lfu", "slru", "fifo", "filo", "priority", "cost"} <= set(Registry().names("eviction"))
    file = tmp_path / "engine.yaml"
    file.write_text("cache:\n  eviction:\n    use: slru\n    grace: -1\n    hit: 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config(str(file), env={})
    text = str(raised.value)
    assert f"{file}:4:5: cache.eviction.grace: must be greater than or equal to 0, got -1" in text
    assert f"{file}:5:5: cache.eviction.hit: unknown key (did you mean 'hits'?)" in text
