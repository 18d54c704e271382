"""lfuda keeps the promises of every eviction rule, and its own."""

from __future__ import annotations

from phloem_lfuda import Lfuda

from phloem.testing import EvictionSuite, FakeEvictionNode


class TestLfuda(EvictionSuite):
    plugin = Lfuda

    def test_uses_before_recency(self) -> None:
        """A prefix used once, just now, goes before one used often, long ago."""
        once, often = FakeEvictionNode(last_access=100, hits=1), FakeEvictionNode(last_access=1, hits=9)
        assert min([often, once], key=self.make().key) is once

    def test_fame_fades(self) -> None:
        """What was used often at a low level goes before what came when more had been evicted."""
        famous, new = FakeEvictionNode(hits=9, level=0.0), FakeEvictionNode(hits=1, level=9.0)
        assert min([new, famous], key=self.make().key) is famous
