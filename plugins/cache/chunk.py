"""A cache that shares nothing: every request computes and keeps its own KV."""

from __future__ import annotations

from array import array

import numpy as np
from pydantic import BaseModel, ConfigDict

from phloem.batch import IntArray
from phloem.interfaces import CacheCounts, CacheListener, Lease, Match, PluginContext, PoolGroup, Published
from phloem.model_spec import ModelSpec
from phloem.request import Namespace

from ._groups import all_groups

_NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)


class ChunkLease:
    """A lease of no tokens."""

    __slots__ = ("released",)

    def __init__(self) -> None:
        self.released = False

    @property
    def length(self) -> int:
        """Always 0."""
        return 0


class ChunkCache:
    """Matches nothing, keeps nothing: all slots stay the request's. The control that sharing is measured against."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """This cache has no options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.version = 0
        self._leases = 0
        self._none = (_NO_SLOTS,) * max(1, len(context.pools))

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool for each state group: requests give back what lies behind their windows."""
        return all_groups(spec)

    def match(self, tokens: array[int], limit: int, namespace: Namespace) -> Match:
        """No prefix."""
        return Match(0, None)

    def peek(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """0."""
        return 0

    def lease(self, match: Match) -> Lease:
        """A lease of nothing."""
        self._leases += 1
        return ChunkLease()

    def slots(self, lease: Lease) -> tuple[IntArray, ...]:
        """No slots."""
        return self._none

    def publish(
        self, tokens: array[int], length: int, slots: tuple[IntArray, ...], lease: Lease, namespace: Namespace
    ) -> Published:
        """Declines the offer: the caller keeps its slots."""
        assert length >= 0, f"publish of {length} tokens"
        self.release(lease)
        return Published(self.lease(Match(0, None)), self._none)

    def release(self, lease: Lease) -> None:
        """End a lease."""
        if not isinstance(lease, ChunkLease) or lease.released:
            raise AssertionError("this lease was released before, or is another cache's")
        lease.released = True
        self._leases -= 1

    def evict(self, slots: int, group: int = 0) -> int:
        """There is nothing to evict."""
        return 0

    def counts(self) -> tuple[CacheCounts, ...]:
        """Owns nothing."""
        return (CacheCounts(0, 0),) * len(self._none)

    def reset(self) -> None:
        """There is nothing to drop."""

    def check(self) -> None:
        """Verify that leases were released at most once each."""
        assert self._leases >= 0, f"{-self._leases} leases were released that were never made"

    def listen(self, listener: CacheListener) -> None:
        """There is nothing to tell."""

    def owned_pages(self) -> list[set[int]]:
        """None."""
        return [set() for _ in self._none]
