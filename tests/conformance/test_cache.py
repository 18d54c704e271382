"""The built-in caches pass the suite that any cache plugin can run."""

from __future__ import annotations

from phloem.plugins.cache.chunk import ChunkCache
from phloem.plugins.cache.radix import RadixCache
from phloem.testing.cache import CacheSuite


class TestRadix(CacheSuite):
    plugin = RadixCache


class TestChunk(CacheSuite):
    plugin = ChunkCache
