"""The prefix cache for models with recurrent layers, among others (LFM2) or alone (Mamba-2)."""

from __future__ import annotations

from typing import ClassVar

from phloem.interfaces import PoolGroup
from phloem.model_spec import ModelSpec

from ._cache import TreeCache
from ._groups import all_groups


class HybridCache(TreeCache):
    """A component for each state group: `full`, `window`, and `recurrent` for layers that keep one state.

    For a model without recurrent layers it is `swa`.
    """

    capabilities: ClassVar[frozenset[str]] = TreeCache.capabilities | {"narrows", "tiers"}

    @classmethod
    def suits(cls, spec: ModelSpec) -> str | None:
        """Models with recurrent layers."""
        return None if spec.states else "no layer is recurrent"

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool for each state group."""
        return all_groups(spec)
