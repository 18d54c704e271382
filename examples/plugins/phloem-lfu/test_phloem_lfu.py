"""lfu keeps the promises of every eviction rule, and its own."""

from __future__ import annotations

from phloem_lfu import Lfu

from phloem.testing import EvictionSuite, FakeEvictionNode


class TestLfu(EvictionSuite):
    plugin = Lfu

    def test_uses_before_recency(self) -> None:
        """A prefix used once, just now, goes before one used often, long ago."""
        once, often = FakeEvictionNode(last_access=100, hits=1), FakeEvictionNode(last_access=1, hits=9)
        assert min([often, once], key=self.make().key) is once

    def test_fame_fades(self) -> None:
        """Beyond `most` uses the least recently used goes first."""
        old, new = FakeEvictionNode(last_access=1, hits=1000), FakeEvictionNode(last_access=2, hits=16)
        assert min([new, old], key=self.make().key) is old
