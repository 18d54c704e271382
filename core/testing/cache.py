"""Conformance of kind `cache`: every promise of the protocol, against a naive model and a canary in every slot.

class TestMine(CacheSuite):
    plugin = MyCache

Needs hypothesis.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ..batch import IntArray
from ..interfaces import Cache, EvictionNode, PluginContext
from ..registry import check_contract
from ..request import Namespace
from ..storage import Spills
from ._cache_history import SALTS, History
from ._cache_rig import CacheRig
from ._cache_toys import Kind, Listener, Prefix, toy_model

# The state groups of toy models with windows: hybrid and pure, below and above the page, with two widths, and a window
# of one token, which sees nothing before it.
MODELS: tuple[tuple[Kind, ...], ...] = ((None, 6), (9,), (None, 3, 40), (1, None))
# And of models with recurrent layers: beside attention, alone, and beside a window.
RECURRENT: tuple[tuple[Kind, ...], ...] = ((None, "states"), ("states",), (None, 6, "states"))


class OldestFirst:
    """The eviction rule that the suite hands to a cache."""

    def key(self, node: EvictionNode) -> int:
        """Last use."""
        return node.last_access


class CacheSuite:
    """Subclass it and set `plugin`; `options` are its options, or replace `make` where it needs extras.

    A plugin with capability `sharing` promises that every published page is matched until it is evicted. One without
    may keep and find less; the tests of that promise skip it, and what it does find must be right.
    """

    plugin: ClassVar[type[Any]]
    options: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[int] = 40  # random histories per page size
    steps: ClassVar[int] = 40  # operations in each

    def make(self, context: PluginContext) -> Cache:
        """A fresh cache over `context.pools`."""
        context.extras["eviction"] = OldestFirst()
        cache: Cache = self.plugin(self.plugin.Options(**self.options), context)
        return cache

    def rig(self, page_size: int, pages: int = 24, kinds: Sequence[Kind] = (None,)) -> CacheRig:
        """A new cache for a model with these state groups over new pools, driven and audited as the scheduler would."""
        return CacheRig(self.plugin, self.make, pages, page_size, kinds)

    @pytest.fixture
    def sharing(self) -> None:
        """Skips the test for caches that do not share."""
        if "sharing" not in self.plugin.capabilities:
            pytest.skip("this cache promises no sharing")

    @pytest.fixture(params=MODELS, ids=str)
    def windows(self, request: pytest.FixtureRequest) -> tuple[Kind, ...]:
        """State groups of a toy model with windows; skips the test for caches that have one pool for all of them."""
        windows: tuple[Kind, ...] = request.param
        rig = self.rig(1, kinds=windows)
        if all(window is None for window in rig.windows):
            pytest.skip("this cache keeps no windows apart")
        return windows

    @pytest.fixture(params=RECURRENT, ids=str)
    def recurrent(self, request: pytest.FixtureRequest) -> tuple[Kind, ...]:
        """State groups of a toy model with recurrent layers; skips the test for caches that keep no states."""
        kinds: tuple[Kind, ...] = request.param
        if not any(group.states for group in self.plugin.groups(toy_model(kinds))):
            pytest.skip("this cache keeps no states")
        return kinds

    @pytest.fixture(params=[1, 4, 16])
    def page_size(self, request: pytest.FixtureRequest) -> int:
        """Page sizes for the tests below."""
        size: int = request.param
        return size

    def test_keeps_the_contract(self) -> None:
        """`api`, `Options`, `capabilities` and every method of the protocol are there and can be called."""
        check_contract("cache", self.plugin.__name__, self.plugin)

    # --- any order of operations ---

    def test_any_order_of_operations(self, page_size: int) -> None:
        """Match, lease, compute, publish, release, evict, reset in any order keep every promise at every moment."""
        self._histories(page_size, (None,))

    def test_any_order_of_operations_with_windows(self, page_size: int, windows: tuple[Kind, ...]) -> None:
        """Likewise with several pools, where requests give back what no token sees any more."""
        self._histories(page_size, windows)

    def test_any_order_of_operations_with_states(self, page_size: int, recurrent: tuple[Kind, ...]) -> None:
        """Likewise with recurrent layers: a match ends at a state that was published there, and nowhere else."""
        self._histories(page_size, recurrent)

    def test_pages_larger_than_the_windows(self, windows: tuple[Kind, ...]) -> None:
        """Likewise with pages of 64 tokens, in fewer histories."""
        self._histories(64, windows, max(1, self.examples // 4))

    def test_large_pages(self) -> None:
        """Where nothing has a window, too."""
        self._histories(64, (None,), max(1, self.examples // 4))

    def test_large_pages_with_states(self, recurrent: tuple[Kind, ...]) -> None:
        """A state is between pages."""
        self._histories(64, recurrent, max(1, self.examples // 8))

    def _histories(self, page_size: int, kinds: tuple[Kind, ...], examples: int | None = None) -> None:
        quick = settings(
            max_examples=examples or self.examples,
            stateful_step_count=self.steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        suite = self

        class Histories(History):
            def __init__(self) -> None:
                super().__init__(suite.rig(page_size, kinds=kinds))

        run_state_machine_as_test(Histories, settings=quick)

    # --- counting and ownership ---

    def test_starts_empty(self, page_size: int) -> None:
        """A new cache owns nothing and matches nothing."""
        rig = self.rig(page_size)
        assert rig.look(_text(5 * page_size), Namespace()) == 0
        rig.audit()
        assert rig.free == rig.total

    def test_prompt_shorter_than_a_page(self, page_size: int) -> None:
        """Less than a page is never taken, matched or lost (key truncated to nothing)."""
        rig = self.rig(page_size)
        for length in range(1, page_size):
            rig.serve(_text(length))
            assert rig.look(_text(length), Namespace()) == 0
            assert rig.free == rig.total

    def test_every_residue_of_the_page(self, page_size: int) -> None:
        """Prompts of all lengths around a page: the whole pages are shared, the rest comes back."""
        rig = self.rig(page_size)
        for length in range(1, 3 * page_size + 2):
            rig.serve(_text(length))
            assert rig.free == rig.total - rig.owned

    def test_overlapping_publishes_count_once(self) -> None:
        """Shared pages are not counted twice, and the copies of whoever publishes second are freed."""
        rig = self.rig(32)
        text, other = _text(32 * 4 + 5), _text(32 * 2) + _text(32 * 2, first=7)
        holders = [rig.start(t, Namespace()) for t in (text, text, other)]  # nobody finds anything yet
        for holder in holders:
            rig.compute(holder, len(holder.tokens))
        for holder in holders:
            rig.publish(holder, len(holder.tokens))
            rig.audit()
        if rig.shares:
            assert rig.owned == 32 * (4 + 2)
        for holder in holders:
            rig.abort(holder)
        assert rig.free + rig.evictable == rig.total

    def test_release_twice_is_an_error(self, page_size: int) -> None:
        """A second release of a lease is refused and changes nothing."""
        rig = self.rig(page_size)
        rig.serve(_text(3 * page_size))
        lease = rig.cache.lease(rig.cache.match(_text(3 * page_size), 3 * page_size, Namespace()))
        rig.cache.release(lease)
        with pytest.raises(AssertionError):
            rig.cache.release(lease)
        rig.audit()

    def test_publish_consumes_its_lease(self, page_size: int) -> None:
        """The lease given to publish is spent, also if nothing new was published."""
        rig = self.rig(page_size)
        holder = rig.start(_text(2 * page_size), Namespace())
        spent = holder.lease
        rig.publish(holder, 0)
        with pytest.raises(AssertionError):
            rig.cache.release(spent)
        rig.abort(holder)
        assert rig.free == rig.total

    def test_abort_at_any_point_returns_every_slot(self, page_size: int) -> None:
        """Whatever was computed and published, an aborted request leaves nothing protected and nothing lost."""
        rig = self.rig(page_size)
        for computed in range(0, 3 * page_size + 1, max(1, page_size // 2)):
            for published in (0, computed // 2, computed):
                holder = rig.start(_text(3 * page_size, first=computed), Namespace())
                rig.compute(holder, computed)
                rig.publish(holder, published)
                rig.abort(holder)
                assert rig.free + rig.evictable == rig.total

    # --- sharing ---

    @pytest.fixture
    def tiers(self) -> None:
        """Skips the test for caches that are not spread over tiers."""
        if "tiers" not in self.plugin.capabilities:
            pytest.skip("this cache is not spread over tiers")

    @pytest.mark.usefixtures("sharing", "tiers")
    def test_what_is_evicted_is_told_before(self, page_size: int) -> None:
        """Each whole block once, when it is about to be broken, with slots that still hold its tokens."""
        told = self._told(self.rig(page_size, 40))
        assert len(told) == len(set(told))

    @pytest.mark.usefixtures("sharing", "tiers")
    def test_windows_are_told_before_they_go(self, page_size: int, windows: tuple[Kind, ...]) -> None:
        """Of each whole block, with all its slots, whichever pool is short."""
        self._told(self.rig(page_size, 40, kinds=windows))

    @pytest.mark.usefixtures("sharing", "tiers")
    def test_states_are_told_before_they_go(self, page_size: int, recurrent: tuple[Kind, ...]) -> None:
        """With the whole blocks that nobody can go on from without them."""
        self._told(self.rig(page_size, 40, kinds=recurrent))

    @pytest.mark.usefixtures("sharing", "tiers")
    def test_all_that_is_there_of_a_lease(self, page_size: int) -> None:
        """`kept` gives what `slots` gives, and what lies behind windows while it is there."""
        for kinds in ((None,), *MODELS[:1], *RECURRENT[:1]):
            if len(self.plugin.groups(toy_model(kinds))) < len(kinds):
                continue
            rig, text = self.rig(page_size, 40, kinds=kinds), _text(7 * page_size)
            rig.serve(text)
            holder = rig.start(text, Namespace(), limit=7 * page_size)
            kept = cast("Spills", rig.cache).kept(holder.lease)
            for group, (all_, needed) in enumerate(zip(kept, rig.cache.slots(holder.lease), strict=True)):
                assert len(all_) == holder.lease.length
                assert np.array_equal(all_[needed >= 0], needed[needed >= 0])
                there = {at + 1 for at in np.flatnonzero(all_ >= 0).tolist()}
                assert there == {at for at in there if rig.canary[group][int(all_[at - 1])] == holder.prefix(at)}
                assert group == rig.states or len(there) == holder.lease.length
            rig.abort(holder)

    def _told(self, rig: CacheRig) -> list[Prefix]:
        """What a taker is told while two texts in two namespaces are evicted: prefixes that whole blocks end.

        Of each of these blocks all that was there in any group, states included, is told before it goes.
        """
        size, states = 2 * rig.page_size, rig.states
        told: list[Prefix] = []
        whole: list[set[Prefix]] = [set() for _ in rig.known]  # prefixes whose last token's slots were told, by group

        def taker(namespace: Namespace, tokens: array[int], base: int, slots: Sequence[IntArray]) -> None:
            assert base % size == len(tokens) % size == 0
            assert [len(own) for own in slots] == [len(tokens) - base] * len(slots)
            for group, own in enumerate(slots):
                for at in np.flatnonzero(own >= 0).tolist():
                    prefix = (namespace, tokens[: base + at + 1].tobytes())
                    assert rig.canary[group][int(own[at])] == prefix, "a slot that holds something else"
                    whole[group].add(prefix)
            told.extend((namespace, tokens[:end].tobytes()) for end in range(base + size, len(tokens) + 1, size))
            if states is not None and slots[states][-1] >= 0:
                before = {(namespace, tokens[:end].tobytes()) for end in range(size, len(tokens) + 1, size)}
                assert before <= set(told), "a state without what it is the state of"

        cast("Spills", rig.cache).spill(taker, size)
        texts = [_text(8 * rig.page_size), _text(3 * rig.page_size) + _text(5 * rig.page_size, first=5)]
        spaces = [Namespace(), Namespace(salt="a")]
        for space in spaces:
            for text in texts:
                rig.serve(text, space)
        there = [set(known) for known in rig.known]
        _evict_all(rig)
        ends = range(size, 8 * rig.page_size + 1, size)
        blocks = {(space, text[:end].tobytes()) for space in spaces for text in texts for end in ends}
        assert set(told) == blocks
        for group, known in enumerate(there):
            assert {prefix for prefix in known if prefix in blocks} <= whole[group], f"group {group} was not told"
            inside = {p for p in known if any(p[0] == space and end.startswith(p[1]) for space, end in blocks)}
            assert group == states or inside <= whole[group], f"group {group} was told in part"
        return told

    @pytest.mark.usefixtures("sharing")
    def test_publish_below_the_lease_is_an_error(self, page_size: int) -> None:
        """Publishing fewer tokens than are leased is refused."""
        rig = self.rig(page_size)
        rig.serve(_text(2 * page_size))
        holder = rig.start(_text(2 * page_size), Namespace(), limit=2 * page_size)
        with pytest.raises(AssertionError):
            rig.cache.publish(holder.tokens, page_size, tuple(holder.slots), holder.lease, Namespace())
        rig.abort(holder)
        assert rig.evictable == 2 * page_size

    @pytest.mark.usefixtures("sharing")
    def test_match_honours_its_limit(self, page_size: int) -> None:
        """No match reaches beyond `limit`, so that the last prompt token can be computed."""
        rig = self.rig(page_size)
        text = _text(3 * page_size)
        rig.serve(text)
        for limit in range(3 * page_size + 1):
            assert rig.look(text, Namespace(), limit) == limit // page_size * page_size

    @pytest.mark.usefixtures("sharing")
    def test_namespaces_share_nothing(self, page_size: int) -> None:
        """Equal strings in different fields, and strings that would concatenate alike, are different namespaces."""
        rig = self.rig(page_size, pages=64)
        text = _text(2 * page_size)
        spaces = [*SALTS, Namespace("", ""), Namespace("", None), Namespace("ab", "c"), Namespace("a", "bc")]
        for i, namespace in enumerate(spaces):
            assert rig.look(text, namespace) == 0, f"{namespace} sees another's prefix"
            rig.serve(text, namespace)
            assert rig.owned == (i + 1) * 2 * page_size

    @pytest.mark.usefixtures("sharing")
    def test_split_changes_no_count(self, page_size: int) -> None:
        """Splitting a shared run, locked or not, moves no slot between evictable and protected."""
        rig = self.rig(page_size)
        text = _text(4 * page_size)
        rig.serve(text)
        owned = rig.evictable
        rig.look(text, Namespace(), limit=page_size)
        assert (rig.evictable, rig.protected) == (owned, 0)
        holder = rig.start(text, Namespace(), limit=4 * page_size)
        rig.look(text, Namespace(), limit=2 * page_size)
        rig.look(text, Namespace(), limit=3 * page_size)
        assert (rig.evictable, rig.protected) == (0, owned)
        rig.abort(holder)
        assert (rig.evictable, rig.protected) == (owned, 0)

    @pytest.mark.usefixtures("sharing")
    def test_leases_protect_exactly_their_path(self, page_size: int) -> None:
        """Evicting everything leaves what is leased, to the page, and no more."""
        rig = self.rig(page_size)
        text = _text(4 * page_size)
        rig.serve(text)
        holder = rig.start(text, Namespace(), limit=2 * page_size)
        assert rig.evict(rig.total) == 2 * page_size
        assert rig.protected == 2 * page_size
        rig.abort(holder)
        assert rig.evict(rig.total) == 2 * page_size
        assert rig.free == rig.total

    @pytest.mark.usefixtures("sharing")
    def test_reset_keeps_leased_prefixes(self, page_size: int) -> None:
        """A flush while requests run drops the rest; the leased slots stay right and come back at the end."""
        rig = self.rig(page_size)
        text = _text(3 * page_size)
        rig.serve(text)
        rig.serve(_text(3 * page_size, first=9))
        holder = rig.start(text, Namespace(), limit=2 * page_size)
        rig.reset()
        assert (rig.evictable, rig.protected) == (0, 2 * page_size)
        rig.compute(holder, 3 * page_size)
        rig.finish(holder)
        assert rig.look(text, Namespace()) == 3 * page_size

    @pytest.mark.usefixtures("sharing")
    def test_a_late_listener_hears_what_is_there(self, page_size: int) -> None:
        """Who begins to listen is told all that is stored, and of what comes; asking again tells all again."""
        rig = self.rig(page_size)
        for i in range(6):
            rig.serve(_text((1 + i % 3) * page_size, first=i % 2), SALTS[i % len(SALTS)])
        late = Listener(page_size)
        rig.cache.listen(late)
        assert late.view == rig.known[0]
        rig.serve(_text(5 * page_size))
        rig.evict(2 * page_size)
        assert late.view == rig.known[0]
        late.view.clear()
        rig.cache.listen(late)
        rig.serve(_text(6 * page_size, first=7))
        assert late.view == rig.known[0]

    @pytest.mark.usefixtures("sharing")
    def test_a_pool_in_pieces_still_serves(self, page_size: int) -> None:
        """After much churn of odd sizes the whole pool can be had again, by one request."""
        rig = self.rig(page_size)
        for i in range(60):
            rig.serve(_text(1 + i * 7 % (3 * page_size), first=i % 5), SALTS[i % len(SALTS)])
        holder = rig.start(_text(rig.total, first=99), Namespace())
        assert rig.compute(holder, rig.total) == rig.total
        rig.abort(holder)
        assert rig.free == rig.total


def _evict_all(rig: CacheRig) -> None:
    """A page at a time, from one pool after the other."""
    while any(evictable for evictable, _ in rig.cache.counts()):
        for group in reversed(range(len(rig.pools))):
            rig.evict(rig.pools[group].page_size, group)


def _text(length: int, first: int = 0) -> array[int]:
    """Distinct tokens, so that any mix-up of positions shows; texts with different `first` share no page."""
    return array("i", [first * 100_003 + i for i in range(length)])
