"""The radix cache's own promises: costs, order of eviction, misuse. Those of every cache are in conformance."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.errors import PluginError
from phloem.interfaces import EvictionNode, Lease, PluginContext
from phloem.plugins.cache.eviction import Lru
from phloem.plugins.cache.radix import RadixCache
from phloem.pool import SlotPool
from phloem.prefix import common_prefix
from phloem.request import Namespace

HERE = Namespace()


class Rule:
    """An eviction rule from a function, which counts its calls."""

    def __init__(self, key: Callable[[EvictionNode], Any]) -> None:
        self.function = key
        self.calls = 0

    def key(self, node: EvictionNode) -> Any:
        self.calls += 1
        return self.function(node)


def lru() -> Rule:
    return Rule(lambda node: node.last_access)


def mru() -> Rule:
    return Rule(lambda node: -node.last_access)


def make(pages: int = 64, page_size: int = 1, rule: Any = None) -> tuple[RadixCache, SlotPool]:
    pool = SlotPool(pages, page_size)
    context = PluginContext("cache", "radix", pools=(pool,), page_size=page_size)
    context.extras["eviction"] = rule or lru()
    return RadixCache(RadixCache.Options(), context), pool


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def begin(cache: RadixCache, tokens: array[int], limit: int | None = None, namespace: Namespace = HERE) -> Lease:
    return cache.lease(cache.match(tokens, len(tokens) if limit is None else limit, namespace))


def publish(cache: RadixCache, pool: SlotPool, tokens: array[int], lease: Lease, namespace: Namespace = HERE) -> Lease:
    fresh = pool.alloc(len(tokens) - lease.length)
    assert fresh is not None
    slots = np.concatenate([*cache.slots(lease), fresh])
    return cache.publish(tokens, len(tokens), (slots,), lease, namespace).lease


def put(cache: RadixCache, pool: SlotPool, tokens: array[int], namespace: Namespace = HERE) -> None:
    """A whole request of whole pages."""
    cache.release(publish(cache, pool, tokens, begin(cache, tokens, namespace=namespace), namespace))
    cache.check()


def has(cache: RadixCache, tokens: array[int]) -> int:
    return cache.peek(tokens, len(tokens), HERE)


# --- keys ---


class Counting(array):  # type: ignore[type-arg]
    """An array that counts its slices."""

    slices = 0

    def __getitem__(self, index: Any) -> Any:
        self.slices += isinstance(index, slice)
        return super().__getitem__(index)


@settings(max_examples=200, deadline=None)
@given(same=st.integers(0, 300), rest=st.integers(0, 300), at=st.integers(0, 40))
def test_common_prefix_equals_a_loop(same: int, rest: int, at: int) -> None:
    key = array("i", range(same + rest))
    tokens = array("i", [7] * at) + key
    if rest:
        tokens[at + same] = -1
    assert common_prefix(key, tokens, at, len(key)) == same


def test_a_shared_prefix_of_4000_tokens_costs_a_dozen_compares() -> None:
    key = Counting("i", range(4_000))
    assert common_prefix(key, array("i", range(4_000)), 0, 4_000) == 4_000
    assert key.slices <= 12


@pytest.mark.parametrize("same", [0, 1, 31, 32, 33, 1_000, 3_999])
def test_a_difference_is_found_in_logarithmic_compares(same: int) -> None:
    key = Counting("i", range(4_000))
    tokens = array("i", range(4_000))
    tokens[same] = -1
    assert common_prefix(key, tokens, 0, 4_000) == same
    assert key.slices <= 20


# --- eviction ---


def test_least_recently_used_leaf_goes_first() -> None:
    cache, pool = make()
    for first in (1, 2, 3):
        put(cache, pool, ids(first, 9))
    cache.match(ids(1, 9), 2, HERE)
    assert cache.evict(2) == 2
    assert [has(cache, ids(first, 9)) for first in (1, 2, 3)] == [2, 0, 2]


def test_end_of_a_lease_counts_as_use() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 1))
    lease = begin(cache, ids(1, 1))
    put(cache, pool, ids(2, 2))
    cache.release(lease)
    cache.evict(1)
    assert (has(cache, ids(1, 1)), has(cache, ids(2, 2))) == (2, 1)


def test_eviction_cascades_up_the_trunk() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2, 3))
    put(cache, pool, ids(1, 2, 3, 4))
    put(cache, pool, ids(1, 2, 3, 5))
    assert cache.evict(2) == 2  # both leaves, although the trunk is no younger
    assert has(cache, ids(1, 2, 3)) == 3
    assert cache.evict(1) == 1
    assert has(cache, ids(1, 2, 3)) == 2
    assert cache.evict(64) == 2
    assert pool.free == pool.total
    cache.check()


def test_only_the_tail_that_is_needed_goes() -> None:
    cache, pool = make(pages=16, page_size=4)
    text = array("i", range(40))
    put(cache, pool, text)
    assert cache.evict(5) == 8
    assert has(cache, text) == 32
    cache.check()


def test_leased_paths_are_ineligible_however_old() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2, 3, 4))
    lease = begin(cache, ids(1, 2, 3, 4), limit=2)
    for first in range(5, 25):
        put(cache, pool, ids(first))
    assert cache.evict(64) == 22
    assert has(cache, ids(1, 2, 3, 4)) == 2
    cache.release(lease)
    assert cache.evict(64) == 2


def test_eviction_asks_the_rule_a_few_times_not_once_per_leaf() -> None:
    rule = lru()
    cache, pool = make(pages=4_096, rule=rule)
    for first in range(2_000):
        cache.release(publish(cache, pool, ids(first), begin(cache, ids(first))))
    rule.calls = 0
    for _ in range(100):
        cache.evict(1)
    assert rule.calls <= 300


def test_a_rule_whose_keys_shrink_is_obeyed() -> None:
    cache, pool = make(rule=mru())
    for first in (1, 2, 3):
        put(cache, pool, ids(first))
    cache.match(ids(1), 1, HERE)
    cache.evict(1)
    assert [has(cache, ids(first)) for first in (1, 2, 3)] == [0, 1, 1]


def test_a_leaf_that_a_split_made_smaller_is_judged_anew() -> None:
    cache, pool = make(rule=Rule(lambda node: node.tokens))
    put(cache, pool, ids(1, 1, 1, 1, 1, 1))
    put(cache, pool, ids(2, 2, 2))
    cache.match(ids(1, 1, 1, 1, 1), 5, HERE)  # leaves a leaf of one token, now the smallest
    cache.check()
    assert cache.evict(1) == 1
    assert (has(cache, ids(1, 1, 1, 1, 1, 1)), has(cache, ids(2, 2, 2))) == (5, 3)


def test_a_rule_may_look_at_hits_size_and_age() -> None:
    seen: list[tuple[int, ...]] = []

    def key(node: EvictionNode) -> int:
        seen.append((node.hits, node.tokens, node.created, node.last_access, node.priority))
        return node.hits

    cache, pool = make(rule=Rule(key))
    put(cache, pool, ids(1, 1))
    put(cache, pool, ids(2, 2))
    lease = begin(cache, ids(1, 1))
    cache.used(lease, 2, 0)
    cache.release(lease)
    cache.evict(2)
    assert has(cache, ids(2, 2)) == 0, "the leaf that was never hit goes first"
    assert all(created <= access and tokens == 2 for _, tokens, created, access, _ in seen)


@pytest.mark.parametrize("broken", [ZeroDivisionError, "no number"])
@pytest.mark.parametrize("when", range(1, 13))
def test_a_rule_that_fails_is_replaced_by_recency(broken: Any, when: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whenever it raises, or gives a key that does not compare: no slot is lost, and all may still be evicted."""

    def key(node: EvictionNode) -> Any:
        if rule.calls <= when:
            return -node.last_access
        if broken is ZeroDivisionError:
            raise ZeroDivisionError
        return broken

    rule = Rule(key)
    cache, pool = make(rule=rule)
    for first in (1, 2, 3, 4):
        put(cache, pool, ids(first, 2, 2))
    cache.release(begin(cache, ids(1, 2, 2)))
    while evicted := cache.evict(2):
        assert evicted <= 2
    assert pool.free == pool.total
    put(cache, pool, ids(5, 5))
    put(cache, pool, ids(6, 6))
    cache.match(ids(5, 5), 2, HERE)
    cache.check()
    cache.evict(2)
    assert (has(cache, ids(5, 5)), has(cache, ids(6, 6))) == (2, 0)
    assert caplog.text.count("eviction rule Rule failed: the least recently used goes first now") == 1


@pytest.mark.parametrize("rule", [lru, mru])
def test_the_heap_does_not_grow_with_use(rule: Callable[[], Rule]) -> None:
    cache, pool = make(rule=rule())
    put(cache, pool, ids(1))
    for _ in range(2_000):
        cache.release(begin(cache, ids(1)))
        cache.match(ids(1), 1, HERE)
    assert len(cache._components[0].order._entries) < 200
    cache.check()


def test_lru_plugin() -> None:
    rule = Lru(Lru.Options(), PluginContext("eviction", "lru"))
    cache, pool = make(rule=rule)
    put(cache, pool, ids(1))
    put(cache, pool, ids(2))
    cache.evict(1)
    assert (has(cache, ids(1)), has(cache, ids(2))) == (0, 1)


# --- leases and splits ---


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("page_size", [1, 2])
def test_leases_survive_splits_above_and_inside(order: tuple[int, ...], page_size: int) -> None:
    """Three leases on one run that is cut after each was made: each release undoes exactly its own."""
    cache, pool = make(page_size=page_size)
    text = array("i", range(8 * page_size))
    put(cache, pool, text)
    leases = [begin(cache, text, limit=k * page_size) for k in (8, 5, 2)]
    expected = {0: 8, 1: 5, 2: 2}
    for which in order:
        cache.release(leases[which])
        del expected[which]
        cache.check()
        longest = max(expected.values(), default=0) * page_size
        assert cache.counts()[0] == (8 * page_size - longest, longest)
    assert cache.evict(64 * page_size) == 8 * page_size


def test_a_lease_keeps_its_slots_when_others_branch_off() -> None:
    cache, pool = make()
    text = array("i", range(10))
    put(cache, pool, text)
    lease = begin(cache, text)
    before = cache.slots(lease)[0]
    for cut in (7, 3, 5):
        put(cache, pool, text[:cut] + ids(100 + cut))
    assert np.array_equal(cache.slots(lease)[0], before)
    cache.release(lease)


def test_empty_lease_outlives_its_namespace() -> None:
    """A cold request's lease is of nothing; the namespace may be emptied and refilled before it publishes."""
    cache, pool = make()
    cold = begin(cache, ids(1, 2))
    put(cache, pool, ids(1, 2))
    cache.reset()
    assert has(cache, ids(1, 2)) == 0
    cache.release(publish(cache, pool, ids(1, 2), cold))
    assert has(cache, ids(1, 2)) == 2
    cache.check()


def test_two_first_matches_of_a_namespace_share_one_root() -> None:
    cache, pool = make()
    one, two = (cache.match(ids(1, 2), 2, HERE) for _ in range(2))
    first, second = cache.lease(one), cache.lease(two)
    longer = publish(cache, pool, ids(1, 2), first)
    last = publish(cache, pool, ids(1, 2), second)
    assert cache.counts()[0] == (0, 2)
    cache.release(longer)
    cache.release(last)
    assert cache.counts()[0] == (2, 0)
    cache.check()


def test_namespaces_that_hold_nothing_are_forgotten() -> None:
    cache, pool = make()
    for i in range(64):
        salt = Namespace(salt=str(i))
        cache.match(ids(1), 1, salt)
        cache.release(begin(cache, ids(1), namespace=salt))
        assert len(cache._tree.roots) == i
        put(cache, pool, ids(1), salt)
    cache.evict(60)
    assert len(cache._tree.roots) == 4
    cache.reset()
    assert not cache._tree.roots


def test_reset_lets_go_of_every_node() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2))
    put(cache, pool, ids(1, 3))
    cache.reset()
    assert not list(cache._tree.nodes())
    assert not cache._components[0].order._entries


# --- publish ---


def test_second_publisher_gets_the_first_ones_slots() -> None:
    cache, pool = make(pages=16, page_size=4)
    text = array("i", range(11))
    one, two = begin(cache, text), begin(cache, text)
    slots = [pool.alloc(12) for _ in range(2)]
    assert slots[0] is not None
    assert slots[1] is not None
    first = cache.publish(text, 11, (slots[0],), one, HERE)
    free = pool.free
    second = cache.publish(text, 11, (slots[1],), two, HERE)
    assert np.array_equal(second.slots[0], slots[0][:8])
    assert pool.free == free + 8, "two whole pages of copies come back, the third stays the caller's"
    assert first.lease.length == second.lease.length == 8
    assert cache.counts()[0] == (0, 8)


def test_publish_after_a_divergence_inside_a_page() -> None:
    """Page-wise: texts that differ inside their second page share the first only."""
    cache, pool = make(pages=16, page_size=4)
    put(cache, pool, ids(0, 1, 2, 3, 4, 5, 6, 7))
    put(cache, pool, ids(0, 1, 2, 3, 4, 5, 9, 9))
    assert has(cache, ids(0, 1, 2, 3, 4, 5, 6, 7)) == 8
    assert has(cache, ids(0, 1, 2, 3, 4, 5, 9, 9)) == 8
    assert has(cache, ids(0, 1, 2, 3, 4, 5, 9, 8)) == 4
    assert cache.counts()[0].evictable == 12


def test_the_callers_array_may_change_afterwards() -> None:
    cache, pool = make()
    text = ids(1, 2, 3)
    slots = pool.alloc(3)
    assert slots is not None
    before = slots.copy()
    lease = cache.publish(text, 3, (slots,), begin(cache, text), HERE).lease
    slots[:] = 63
    text[0] = 9
    assert np.array_equal(cache.slots(lease)[0], before)
    assert has(cache, ids(1, 2, 3)) == 3


def test_what_slots_returns_is_the_callers() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2))
    lease = begin(cache, ids(1, 2))
    cache.slots(lease)[0][:] = 63
    cache.release(lease)
    cache.check()


def test_publish_step_by_step_costs_nothing_for_what_is_leased() -> None:
    """Chunk by chunk: each publish starts at its lease, so the prefix before it is never compared again."""
    cache, pool = make(pages=256)
    text = Counting("i", range(200))
    lease = begin(cache, text)
    for end in range(20, 201, 20):
        fresh = pool.alloc(20)
        assert fresh is not None
        slots = np.concatenate([*cache.slots(lease), fresh])
        text.slices = 0
        lease = cache.publish(text, end, (slots,), lease, HERE).lease
        assert text.slices <= 1, "only the new key is cut out"
    assert lease.length == 200
    cache.release(lease)
    cache.check()


def test_version_moves_only_when_a_match_could() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2, 3, 4))
    version = cache.version
    lease = begin(cache, ids(1, 2, 3, 4), limit=2)
    lease = publish(cache, pool, ids(1, 2, 3, 4), lease)
    cache.release(lease)
    cache.peek(ids(1, 2), 2, HERE)
    assert cache.evict(0) == 0
    assert cache.version == version
    put(cache, pool, ids(1, 2, 9))
    assert cache.version > version
    version = cache.version
    cache.evict(1)
    assert cache.version > version
    version = cache.version
    cache.reset()
    assert cache.version > version


# --- misuse ---


def test_release_twice_is_refused() -> None:
    cache, pool = make()
    put(cache, pool, ids(1))
    lease = begin(cache, ids(1))
    cache.release(lease)
    with pytest.raises(AssertionError, match="released or published before"):
        cache.release(lease)
    with pytest.raises(AssertionError, match="released or published before"):
        cache.slots(lease)
    cache.check()


def test_another_caches_lease_is_refused() -> None:
    (one, _), (two, _) = make(), make()
    with pytest.raises(AssertionError, match="another cache's"):
        two.release(begin(one, ids(1)))


def test_a_match_that_was_evicted_cannot_be_leased() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2))
    match = cache.match(ids(1, 2), 2, HERE)
    cache.reset()
    with pytest.raises(AssertionError, match="a match of 2 tokens was evicted before it was leased"):
        cache.lease(match)
    cache.check()


def test_publish_below_its_lease_is_refused() -> None:
    cache, pool = make()
    put(cache, pool, ids(1, 2, 3))
    lease = begin(cache, ids(1, 2, 3))
    with pytest.raises(AssertionError, match="publish of 2 tokens: 3 are leased, 3 slots and 3 tokens given"):
        cache.publish(ids(1, 2, 3), 2, cache.slots(lease), lease, HERE)
    with pytest.raises(AssertionError, match="publish of 4 tokens: 3 are leased, 3 slots and 3 tokens given"):
        cache.publish(ids(1, 2, 3), 4, cache.slots(lease), lease, HERE)
    cache.check()


def test_publish_into_another_namespace_is_refused() -> None:
    cache, pool = make()
    lease = begin(cache, ids(1), namespace=Namespace(salt="a"))
    slots = pool.alloc(1)
    assert slots is not None
    with pytest.raises(AssertionError, match=r"publish into .*adapter='a'.* under a lease in .*salt='a'"):
        cache.publish(ids(1), 1, (slots,), lease, Namespace(adapter="a"))


def test_a_cache_without_eviction_rule_is_refused() -> None:
    context = PluginContext("cache", "radix", pools=(SlotPool(1, 1),))
    with pytest.raises(PluginError, match=r"cache\.radix got 1 pools and eviction rule None"):
        RadixCache(RadixCache.Options(), context)


# --- check() finds what is wrong ---


def _first(cache: RadixCache) -> Any:
    return next(cache._tree.nodes())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda c, p: setattr(c._tree, "evictable", 99), "evictable and protected are counted"),
        (lambda c, p: setattr(c._tree, "protected", 1), "evictable and protected are counted"),
        (lambda c, p: setattr(_first(c), "locks", 1), "0 locks at a node that ends 1 leases"),
        (lambda c, p: setattr(_first(c), "end", 5), "a node that ends at 5"),
        (lambda c, p: _first(c).states.__setitem__(0, _first(c).states[0][:2]), "2 slots for 4 tokens"),
        (lambda c, p: _first(c).states.__setitem__(0, _first(c).states[0][::-1]), "not whole pages"),
        (lambda c, p: setattr(_first(c), "key", ids(9, 9, 9, 9)), "filed under another page"),
        (lambda c, p: c._components[0].order.clear(), "candidates, 0 well placed"),
        (lambda c, p: p.release(_first(c).states[0]), "also free"),
        (lambda c, p: p.release(_free_page(p)), "a page is free twice"),
        (lambda c, p: c._tree.roots.update({Namespace("x"): c._tree.roots[HERE]}), "is filed under"),
    ],
)
def test_check_names_the_damage(harm: Callable[[RadixCache, SlotPool], object], message: str) -> None:
    cache, pool = make(pages=8, page_size=4)
    put(cache, pool, ids(0, 1, 2, 3))
    put(cache, pool, ids(4, 5, 6, 7))
    cache.check()
    harm(cache, pool)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def _free_page(pool: SlotPool) -> Any:
    page = min(pool.free_set())
    return np.arange(page * 4, page * 4 + 4, dtype=np.int32)


# --- listeners ---


class Heard:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int], int]] = []

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        self.log.append(("stored", tokens.tolist(), start))

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        self.log.append(("removed", tokens.tolist(), start))

    def cleared(self) -> None:
        self.log.append(("cleared", [], 0))

    def take(self) -> list[tuple[str, list[int], int]]:
        log, self.log = self.log, []
        return log


def test_listeners_hear_what_changes_and_nothing_else() -> None:
    cache, pool = make()
    one, two = Heard(), Heard()
    cache.listen(one)
    cache.listen(two)
    put(cache, pool, ids(1, 2, 3, 4))
    assert one.take() == [("stored", [1, 2, 3, 4], 0)]
    cache.match(ids(1, 2), 2, HERE)  # a split
    put(cache, pool, ids(1, 2, 3, 4))  # nothing new
    assert not one.log
    put(cache, pool, ids(1, 2, 9))
    assert one.take() == [("stored", [1, 2, 9], 2)]
    cache.match(ids(1, 2, 9), 3, HERE)
    cache.evict(1)
    assert one.take() == [("removed", [1, 2, 3, 4], 3)], "the tail that went, and no more"
    lease = begin(cache, ids(1, 2, 9), limit=2)
    cache.reset()
    assert one.take() == [("cleared", [], 0), ("stored", [1, 2], 0)]
    cache.release(lease)
    assert not one.log
    assert len(two.log) == 5
