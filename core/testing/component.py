"""Conformance of kind `component`: in a tree with others it keeps every promise of a cache, whatever happens to it.

class TestMine(ComponentSuite):
    plugin = MyComponent

Needs hypothesis.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from ..components import Component, Place, TreeNode
from ..interfaces import Cache, PluginContext, PoolGroup
from ..pool import SlotPool
from ..registry import Registry
from ..request import Namespace
from ._cache_toys import Kind
from .cache import MODELS, RECURRENT, CacheSuite
from .plugin import TOY_SPEC, PluginSuite

# Caches with groups of each kind, and models for them.
CACHES = {"full": "radix", "window": "swa", "recurrent": "hybrid"}
KINDS: dict[str, tuple[tuple[Kind, ...], ...]] = {"full": ((None,),), "window": MODELS, "recurrent": RECURRENT}


class FakeTree:
    """A tree of nothing."""

    page_size = 1
    clock = evictable = protected = 0
    level = 0.0

    def nodes(self) -> Iterator[TreeNode]:
        """None."""
        return iter(())

    def split(self, node: TreeNode, at: int) -> TreeNode:
        """There is nothing to split."""
        raise AssertionError(f"a split of {node} at {at}")


class FakeOrder:
    """First come, first to go."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def offer(self, item: Any) -> None:
        """Once each."""
        if item not in self.items:
            self.items.append(item)

    def pop(self) -> Any:
        """The first that may go."""
        found = next((item for item in self.items if item.is_candidate), None)
        self.items.remove(found) if found is not None else None
        return found

    def clear(self) -> None:
        """Nothing is left."""
        self.items.clear()

    def check(self, candidates: int) -> None:
        """Count them."""
        assert sum(item.is_candidate for item in self.items) == candidates


class ComponentSuite(PluginSuite):
    """Subclass it and set `plugin`, and `group` to the kind of state group it is for; `options` are its options."""

    kind = "component"
    group: ClassVar[str] = "window"
    window: ClassVar[int] = 16  # of the group that `make` puts it into
    examples: ClassVar[int] = 25  # random histories per page size and model
    steps: ClassVar[int] = 40  # operations in each

    def make(self) -> Component:
        """One for a group of `window`, in a tree of nothing."""
        states = (0,) if self.group == "recurrent" else ()
        group = PoolGroup(self.group, (0,), self.window if self.group == "window" else None, states)
        context = PluginContext(self.kind, "under test", model=TOY_SPEC, pools=(SlotPool(64, 1),))
        context.extras["place"] = Place(FakeTree(), 0, group, FakeOrder)
        made: Component = self.plugin(self.plugin.Options(**self.options), context)
        return made

    def inside(self) -> CacheSuite:
        """The suite of a cache that has the component under test in its groups of that kind."""
        given = {self.group: ("under test", self.plugin, self.plugin.Options(**self.options))}

        class Inside(CacheSuite):
            plugin = Registry().load("cache", CACHES[self.group])
            examples, steps = self.examples, self.steps

            def make(self, context: PluginContext) -> Cache:
                context.extras["components"] = given
                return super().make(context)

        return Inside()

    @pytest.fixture(params=range(max(map(len, KINDS.values()))))
    def model(self, request: pytest.FixtureRequest) -> tuple[Kind, ...]:
        """State groups of a toy model, one of them of the kind under test at least."""
        models = KINDS[self.group]
        if request.param >= len(models):
            pytest.skip("there are fewer models of this kind")
        return models[request.param]

    # --- what it needs

    def test_what_is_needed_is_what_the_next_token_sees(self) -> None:
        """At least that; and what was not needed any more is not needed again."""
        made, before = self.make(), 0
        for end in range(4 * self.window):
            low = made.low(end)
            assert before <= low <= end, f"{low} is the first token needed at {end}, it was {before} one before"
            if self.group != "recurrent":
                seen = end if made.group.window is None else min(end, made.group.window - 1)
                assert end - low >= seen, f"at {end} the next token sees {seen} tokens, from {low} on is kept"
            before = low

    # --- in a tree

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_any_order_of_operations(self, page_size: int, model: tuple[Kind, ...]) -> None:
        """Match, lease, compute, publish, release, evict, reset in any order keep every promise at every moment."""
        self.inside()._histories(page_size, model)

    def test_pages_larger_than_the_windows(self, model: tuple[Kind, ...]) -> None:
        """Likewise with pages of 64 tokens, in fewer histories."""
        self.inside()._histories(64, model, max(1, self.examples // 4))

    @pytest.mark.parametrize("page_size", [1, 4])
    def test_all_that_no_lease_needs_can_be_evicted(self, page_size: int, model: tuple[Kind, ...]) -> None:
        """However it orders: `pop` names every candidate, and nothing else."""
        rig = self.inside().rig(page_size, 48, model)
        texts = [array("i", [first * 1000 + i for i in range(9 * page_size)]) for first in range(3)]
        for text in texts:
            rig.serve(text)
            rig.serve(text[: 5 * page_size] + array("i", [7] * 3 * page_size))
        holder = rig.start(texts[-1], Namespace())
        for group in range(len(rig.pools)):
            for _ in range(200):
                if not rig.evict(page_size, group):
                    break
            assert rig.cache.counts()[group].evictable == 0
            rig.audit()
        rig.finish(holder)
        rig.audit()
