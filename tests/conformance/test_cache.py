"""The built-in caches, and the one in the docs, pass the suite that any cache plugin can run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from phloem.plugins.cache.chunk import ChunkCache
from phloem.plugins.cache.hybrid import HybridCache
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.cache.swa import SwaCache
from phloem.testing.cache import CacheSuite

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "cache.md"


def documented(title: str, name: str) -> Any:
    """A class of the docs' snippet with that title."""
    snippet = re.search(rf'^```python title="{title}"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert snippet, f"{PAGE} shows no {title}"
    spec = importlib.util.spec_from_loader(title.removesuffix(".py"), loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(snippet[1], title, "exec", dont_inherit=True), module.__dict__)
    return getattr(module, name)


class TestRadix(CacheSuite):
    """what-breaks 3, 4, 5, 15: namespaces, pages, splits."""

    plugin = RadixCache


class TestSwa(CacheSuite):
    """what-breaks 7: tombstones are healed, with a canary in every slot."""

    plugin = SwaCache
    examples = 25


class TestHybrid(CacheSuite):
    """A state for each of its snapshots, whatever is cut, evicted and published again around it."""

    plugin = HybridCache
    examples = 12  # what it shares with `swa` is tested there


class TestChunk(CacheSuite):
    plugin = ChunkCache
    examples = 10  # nothing is shared: there is little to get wrong


class TestDocumented(CacheSuite):
    plugin = documented("last_text.py", "LastText")
