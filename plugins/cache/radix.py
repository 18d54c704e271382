"""The prefix cache that keeps every token of every layer: windows, where a model has them, save nothing."""

from __future__ import annotations

from typing import ClassVar

from phloem.interfaces import PoolGroup
from phloem.model_spec import ModelSpec

from ._cache import TreeCache
from ._groups import kinds


class RadixCache(TreeCache):
    """One component, `full`, for all layers: a token has a slot in all of them or in none."""

    capabilities: ClassVar[frozenset[str]] = TreeCache.capabilities | {"tiers"}

    @classmethod
    def suits(cls, spec: ModelSpec) -> str | None:
        """Models whose layers all see everything; others waste memory."""
        others = sorted(kinds(spec) - {"full"})
        return f"it keeps every token, of {' and '.join(others)} layers too" if others else None

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool."""
        return (PoolGroup("full", tuple(range(len(spec.layers)))),)
