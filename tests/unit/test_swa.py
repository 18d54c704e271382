"""The cache `swa`, alone: what a window needs, tombstones and their healing, what goes first, and sizes of pools."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from phloem.errors import PluginError
from phloem.interfaces import EvictionNode, Lease, PluginContext
from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec
from phloem.plugins.cache._cache import CUT_TOKENS
from phloem.plugins.cache.swa import SwaCache
from phloem.pool import SlotPool
from phloem.request import Namespace
from phloem.windows import guide, needed_from, sizes, span, stride

HERE = Namespace()
FULL, WINDOW = 0, 1
W = 8


class Oldest:
    """Least recently used first."""

    def key(self, node: EvictionNode) -> int:
        return node.last_access


class Rig:
    """A cache for a hybrid model over large pools."""

    def __init__(self, page: int = 1, slots: int = 1024, window: int = W) -> None:
        groups = (GroupSpec("full"), GroupSpec("window", "window", window))
        spec = ModelSpec("toy", 8, 10**6, (LayerSpec(1, 1, 1, 0), LayerSpec(1, 1, 1, 1)), groups)
        self.pools = tuple(SlotPool(slots // page, page) for _ in groups)
        context = PluginContext("cache", "swa", model=spec, pools=self.pools, page_size=page)
        context.extras["eviction"] = Oldest()
        self.cache = SwaCache(SwaCache.Options(), context)

    def begin(self, tokens: array[int], limit: int | None = None) -> Lease:
        return self.cache.lease(self.cache.match(tokens, len(tokens) if limit is None else limit, HERE))

    def publish(self, tokens: array[int], lease: Lease, gone: int = 0) -> Lease:
        """The rest after the lease, computed; window slots before token `gone` were given back."""
        offered = []
        for group, pool in enumerate(self.pools):
            slots = np.full(len(tokens), -1, dtype=np.int32)
            first = max(lease.length, gone if group == WINDOW else 0)
            fresh = pool.alloc(len(tokens) - first)
            assert fresh is not None
            slots[first:] = fresh
            offered.append(slots)
        made = self.cache.publish(tokens, len(tokens), tuple(offered), lease, HERE).lease
        self.cache.check()
        return made

    def put(self, tokens: array[int], gone: int = 0) -> None:
        self.cache.release(self.publish(tokens, self.begin(tokens), gone))
        self.cache.check()

    def has(self, tokens: array[int]) -> int:
        return self.cache.peek(tokens, len(tokens), HERE)

    def used(self, group: int) -> int:
        return self.pools[group].total - self.pools[group].free


def text(length: int, first: int = 0) -> array[int]:
    return array("i", range(first * 1000, first * 1000 + length))


# --- what a match may end at


def test_a_match_ends_where_a_window_is_whole() -> None:
    rig = Rig()
    rig.put(text(40), gone=20)  # runs from 20 on: the first end with seven slots before it is 27
    ends = [rig.has(text(length)) for length in range(41)]
    assert ends == [0] * 27 + list(range(27, 41))
    assert rig.used(FULL), rig.used(WINDOW) == (40, 20)


def test_a_text_that_begins_with_its_run_is_found_at_every_end() -> None:
    rig = Rig()
    rig.put(text(20))
    assert [rig.has(text(length)) for length in range(21)] == list(range(21))


@pytest.mark.parametrize("page", [4, 16, 64])
def test_pages_larger_than_the_window(page: int) -> None:
    rig = Rig(page)
    rig.put(text(4 * page), gone=2 * page)
    assert [rig.has(text(k * page)) // page for k in range(5)] == ([0, 0, 0, 3, 4] if page > W else [0, 0, 0, 0, 4])


def test_computing_it_again_heals() -> None:
    rig = Rig()
    rig.put(text(40), gone=30)
    assert rig.has(text(20)) == 0
    version, before = rig.cache.version, rig.used(FULL)
    rig.put(text(20))
    assert rig.cache.version > version
    assert [rig.has(text(length)) for length in (5, 20, 36, 40)] == [5, 20, 20, 40], "20 to 30 are missing still"
    assert rig.used(FULL) == before, "the full slots were there: their copies are free again"
    rig.cache.release(rig.publish(text(40), rig.begin(text(40), limit=20)))
    assert rig.has(text(33)) == 33
    assert rig.used(WINDOW) == 40


def test_a_second_publisher_gives_back_what_is_there() -> None:
    rig = Rig()
    one, two = rig.begin(text(30)), rig.begin(text(30))
    one, two = rig.publish(text(30), one, gone=10), rig.publish(text(30), two, gone=5)
    assert (rig.used(FULL), rig.used(WINDOW)) == (30, 25)
    slots = rig.cache.slots(two)[WINDOW]
    assert (slots[:23] == -1).all() and (slots[23:] >= 0).all()  # noqa: PT018
    assert np.array_equal(slots, rig.cache.slots(one)[WINDOW])


# --- what a lease protects


def test_a_lease_protects_one_window_and_the_whole_path() -> None:
    rig = Rig()
    rig.put(text(40))
    lease = rig.begin(text(40), limit=30)
    full, window = rig.cache.counts()
    assert (full.protected, window.protected) == (30, W - 1)
    assert rig.cache.evict(10**6, WINDOW) == 40 - (W - 1)
    assert rig.used(FULL) == 30, "a tail without its window is of no use"
    assert rig.has(text(40)) == 30
    rig.cache.release(lease)
    rig.cache.check()
    assert rig.cache.evict(10**6, FULL) == 30
    assert rig.used(WINDOW) == 0


def test_a_narrowed_lease_protects_the_path_alone() -> None:
    rig = Rig()
    rig.put(text(40))
    lease = rig.begin(text(40))
    for start, left in ((20, 7), (35, 5), (36, 4), (40, 0), (50, 0)):
        rig.cache.narrow(lease, start, WINDOW)
        rig.cache.check()
        assert rig.cache.counts()[WINDOW].protected == left
        assert (rig.cache.slots(lease)[WINDOW] >= 0).sum() == left
    rig.cache.narrow(lease, 40, FULL)
    assert rig.cache.counts()[FULL].protected == 40
    rig.cache.evict(10**6, WINDOW)
    assert (rig.used(FULL), rig.used(WINDOW)) == (40, 0)
    rig.cache.release(lease)
    assert rig.used(FULL) == 0, "nothing can end there any more"


def test_a_match_whose_window_was_evicted_cannot_be_leased() -> None:
    rig = Rig()
    rig.put(text(20))
    rig.put(text(40))
    lease = rig.begin(text(40))
    match = rig.cache.match(text(20), 20, HERE)
    rig.cache.evict(10**6, WINDOW)
    with pytest.raises(AssertionError, match="a match of 20 tokens was evicted"):
        rig.cache.lease(match)
    rig.cache.release(lease)
    rig.cache.check()


# --- what goes first


def test_ends_stay_longest() -> None:
    """Runs that no end needs go before those at the ends, of older texts as well."""
    rig = Rig()
    for first in range(3):
        lease = rig.begin(text(80, first))
        for end in range(16, 81, 16):  # as chunks of a prompt
            lease = rig.publish(text(80, first)[:end], lease)
        rig.cache.release(lease)
    rig.cache.evict(3 * (80 - W), WINDOW)
    assert [rig.has(text(80, first)) for first in range(3)] == [80] * 3
    assert rig.used(FULL) == 3 * 80


def test_inner_runs_go_in_pieces_that_bound_the_path() -> None:
    rig = Rig()
    lease = rig.publish(text(600), rig.begin(text(600)))
    for _ in range(300):
        rig.cache.evict(1, WINDOW)
    assert rig.used(WINDOW) <= 600 - 300
    nodes = list(rig.cache._tree.nodes())
    assert len(nodes) <= 600 // CUT_TOKENS + 3
    rig.cache.release(lease)


def test_a_match_refreshes_its_own_window_only() -> None:
    rig = Rig()
    rig.put(text(40))
    rig.put(text(40, first=1))
    rig.cache.match(text(20), 20, HERE)
    rig.cache.evict(80 - (W - 1), WINDOW)
    assert rig.used(WINDOW) == W - 1
    assert rig.has(text(20)) == 20
    assert rig.has(text(40)) == 20
    assert rig.has(text(40, first=1)) == 0


def test_a_listener_is_not_told_of_tombstones() -> None:
    rig = Rig()
    heard: list[tuple[str, int, int]] = []

    class Listener:
        def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
            heard.append(("stored", len(tokens), start))

        def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
            heard.append(("removed", len(tokens), start))

        def cleared(self) -> None:
            heard.append(("cleared", 0, 0))

    rig.cache.listen(Listener())
    rig.put(text(40), gone=30)
    assert heard == [("stored", 40, 0)]
    rig.put(text(20))
    lease = rig.begin(text(40))
    rig.cache.evict(10**6, WINDOW)
    assert len(heard) == 1
    rig.cache.release(lease)
    rig.cache.evict(1, WINDOW)
    assert heard[1][0] == "removed"


def test_the_wrong_number_of_pools_is_refused() -> None:
    spec = ModelSpec("toy", 8, 99, (LayerSpec(1, 1, 1),))
    context = PluginContext("cache", "swa", model=spec, pools=(SlotPool(1, 1),) * 2)
    context.extras["eviction"] = Oldest()
    with pytest.raises(PluginError, match="got 2 pools"):
        SwaCache(SwaCache.Options(), context)


# --- check() finds what is wrong


def first_run(cache: SwaCache) -> Any:
    return next(node.states[WINDOW] for node in cache._tree.nodes() if node.states[WINDOW] is not None)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda c: setattr(first_run(c), "locks", 3), "3 locks at a run that"),
        (lambda c: setattr(c._components[WINDOW], "_evictable", 99), "counted CacheCounts"),
        (lambda c: c._components[WINDOW].order.clear(), "candidates, 0 well placed"),
        (lambda c: setattr(first_run(c), "slots", first_run(c).slots[::-1]), "not whole pages"),
        (lambda c: c._components[WINDOW].pool.release(first_run(c).slots), "also free"),
        (lambda c: [c._components[WINDOW].bury(n) for n in list(c._tree.nodes())], "leaf that no match can end at"),
    ],
)
def test_check_names_the_damage(harm: Any, message: str) -> None:
    rig = Rig(page=4)
    rig.put(text(16))
    harm(rig.cache)
    rig.cache._flush()
    with pytest.raises(AssertionError, match=message):
        rig.cache.check()


# --- sizes


def test_sizes_of_pools() -> None:
    """Full groups have all; a window's pool what running requests need and one window per so many tokens, or all."""
    run = {"running": 4, "step": 64, "every": 2048, "pinned": 0}
    assert sizes([None, 512], 65_536, 1, **run) == (65_536, 4 * span(512, 1) + 2 * 64 + 511 * 32)
    assert sizes([None, 512], 1_000, 1, **run) == (1_000, 1_000)
    assert sizes([512], 1_000, 1, **run) == (1_000,)
    widths = sizes([128, None, 1024], 10**6, 16, **run)
    assert widths[1] == 10**6
    assert widths[0] < widths[2] < 10**6
    assert all(size % 16 == 0 for size in widths)
    assert sizes([None, 512], 65_536, 1, **run | {"pinned": 100})[1] == sizes([None, 512], 65_536, 1, **run)[1] + 100
    assert guide([128, None, 1024]) == 1
    assert guide([128, 1024]) == 1


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 512])
def test_what_is_still_needed(page: int, window: int) -> None:
    """All that the next token sees, and all that a continuation of the published pages will; and hardly more."""
    for computed in range(3 * (window + page)):
        low = needed_from(computed, window, page)
        assert low % page == 0
        assert low <= max(0, computed // page * page - (window - 1)) <= max(0, computed - (window - 1))
        assert computed - low + stride(window, page) <= span(window, page)
