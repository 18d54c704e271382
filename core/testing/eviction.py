"""Conformance of kind `eviction`: keys of any nodes compare, and reading a key changes nothing.

class TestMine(EvictionSuite):
    plugin = MyRule
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

import pytest

from ..interfaces import Eviction
from .plugin import PluginSuite


@dataclass(slots=True)
class FakeEvictionNode:
    """A leaf of the tree as a rule sees it."""

    last_access: int = 0
    created: int = 0
    hits: int = 0
    tokens: int = 1
    end: int = 1
    priority: int = 0
    level: float = 0.0


def leaves(count: int, seed: int = 0) -> list[FakeEvictionNode]:
    """Leaves of all sorts, extremes among them."""
    rng = random.Random(seed)
    nodes = [
        FakeEvictionNode(),
        FakeEvictionNode(2**62, 2**62, 2**31, 10**6, 10**7, 100, 1e9),
        FakeEvictionNode(priority=-100),
    ]
    for _ in range(count):
        created = rng.randrange(10**6)
        access = created + rng.randrange(10**6)
        tokens, end = rng.randrange(1, 4096), rng.randrange(4096)
        node = FakeEvictionNode(access, created, rng.randrange(50), tokens, tokens + end, rng.randrange(-3, 4))
        node.level = rng.random() * 1e6
        nodes.append(node)
    return nodes


class EvictionSuite(PluginSuite):
    """A rule is a function of the node alone, total and cheap: it is asked for every push and pop of a heap."""

    kind = "eviction"

    def rule(self) -> Eviction:
        """`make`, typed."""
        rule: Eviction = self.make()
        return rule

    @pytest.mark.parametrize("seed", range(5))
    def test_keys_are_totally_ordered(self, seed: int) -> None:
        """Keys of any two nodes compare, one way only."""
        rule = self.rule()
        keys = [rule.key(node) for node in leaves(60, seed)]
        for a in keys:
            for b in keys:
                assert (a < b) + (b < a) + (a == b) == 1, f"{a!r} and {b!r} have no order"

    def test_keys_are_pure(self) -> None:
        """A node's key depends on the node, not on what was asked before, and reading it changes nothing."""
        rule, nodes = self.rule(), leaves(60)
        before = [asdict(node) for node in nodes]
        forwards = [rule.key(node) for node in nodes]
        backwards = [rule.key(node) for node in reversed(nodes)][::-1]
        assert forwards == backwards
        assert before == [asdict(node) for node in nodes]

    def test_two_rules_agree(self) -> None:
        """A second instance with the same options orders the same."""
        nodes = leaves(60)
        assert [self.rule().key(node) for node in nodes] == [self.rule().key(node) for node in nodes]

    def test_use_never_hastens(self) -> None:
        """More hits or a higher priority give no smaller key: they come to a node while it waits in the heap."""
        rule = self.rule()
        for node in leaves(60):
            assert not rule.key(replace(node, hits=node.hits + 1)) < rule.key(node), "a hit brings the end nearer"
            assert not rule.key(replace(node, priority=node.priority + 1)) < rule.key(node), "priority brings it nearer"

    def test_ageing_keys_start_from_the_level(self) -> None:
        """With `ageing`, keys are numbers at or above the node's level and rise with it: whatever stays unused goes."""
        if "ageing" not in self.plugin.capabilities:
            pytest.skip("this rule does not age")
        rule = self.rule()
        for node in leaves(60):
            key = rule.key(node)
            assert key >= node.level, f"a key of {key} below the level {node.level}: the level would never pass it"
            later = replace(node, level=node.level + 1000.0)
            assert rule.key(later) > key, "a use at a higher level makes no difference"
