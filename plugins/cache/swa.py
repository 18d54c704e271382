"""The prefix cache for models with sliding windows, in some of their layers (Gemma 3) or in all (Mistral)."""

from __future__ import annotations

from typing import ClassVar

from phloem.interfaces import PoolGroup
from phloem.model_spec import ModelSpec

from ._cache import TreeCache
from ._groups import kinds, pool_groups


class SwaCache(TreeCache):
    """A component for each state group: `full` for layers that see everything, `window` for each width of window.

    For a model without windows it is `radix`.
    """

    capabilities: ClassVar[frozenset[str]] = TreeCache.capabilities | {"narrows", "tiers"}

    @classmethod
    def suits(cls, spec: ModelSpec) -> str | None:
        """Models some of whose layers have windows, and all others see everything."""
        found = kinds(spec)
        if "recurrent" in found:
            return "it keeps no recurrent states"
        return None if "window" in found else "no layer has a window"

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool for each state group."""
        return pool_groups(spec)
