"""The texts of `phloem plugins new` for what keeps KV: caches and storages."""

from __future__ import annotations

from ._template_head import CLASS, HEAD

CACHE = f'''{HEAD}from array import array
from dataclasses import dataclass

import numpy as np
from phloem.batch import IntArray
from phloem.interfaces import CacheCounts, CacheListener, Lease, Match, PluginContext, PoolGroup, Published
from phloem.model_spec import ModelSpec
from phloem.request import Namespace
from pydantic import BaseModel, ConfigDict


@dataclass(slots=True)
class Nothing:
    """A lease of no tokens."""

    length: int = 0
    released: bool = False
{CLASS}
    def __init__(self, options: Options, context: PluginContext) -> None:
        self.version = 0  # change it whenever a match may have changed
        self._none: IntArray = np.empty(0, dtype=np.int32)

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """One pool for all layers."""
        return (PoolGroup("full", tuple(range(len(spec.layers)))),)

    def match(self, tokens: array[int], limit: int, namespace: Namespace) -> Match:
        """Start here: the longest prefix of tokens[:limit] whose KV is kept."""
        return Match(0, None)

    def peek(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """What `match` would find, changing nothing."""
        return 0

    def lease(self, match: Match) -> Lease:
        """Protect a match from eviction."""
        return Nothing()

    def slots(self, lease: Lease) -> tuple[IntArray, ...]:
        """The slots of the leased tokens."""
        return (self._none,)

    def publish(
        self, tokens: array[int], length: int, slots: tuple[IntArray, ...], lease: Lease, namespace: Namespace
    ) -> Published:
        """Declines: the caller keeps its slots. With capability `sharing`, take them and return a longer lease."""
        self.release(lease)
        return Published(Nothing(), (self._none,))

    def release(self, lease: Lease) -> None:
        """The end of a lease, once."""
        assert isinstance(lease, Nothing) and not lease.released, "this lease was released before"
        lease.released = True

    def evict(self, slots: int, group: int = 0) -> int:
        """Free slots into the pool (`context.pools[group]`); returns how many."""
        return 0

    def counts(self) -> tuple[CacheCounts, ...]:
        """Evictable and protected slots."""
        return (CacheCounts(0, 0),)

    def reset(self) -> None:
        """Drop what is not leased."""

    def check(self) -> None:
        """Verify the cache's own invariants."""

    def listen(self, listener: CacheListener) -> None:
        """Tell it what is stored, then what is stored and removed. With capability `sharing` this is owed."""

    def owned_pages(self) -> list[set[int]]:
        """Pages that the cache owns."""
        return [set()]
'''

STORAGE = f'''{HEAD}from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from phloem.interfaces import PluginContext
from pydantic import BaseModel, ConfigDict, Field
{CLASS}
        size: int = Field(default=1 << 30, ge=1)
        """Most bytes that are kept."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._most = options.size
        self._held: OrderedDict[bytes, bytes] = OrderedDict()  # memory, for a start: replace it, and keep the test
        self._lock = Lock()

    def holds(self, name: bytes) -> bool:
        """Called on the loop's thread: from memory, never from a device."""
        return name in self._held

    def read(self, name: bytes) -> bytes | None:
        """What was written, or None; OSError where the device fails."""
        self.touch([name])
        return self._held.get(name)

    def write(self, name: bytes, data: bytes) -> None:
        """All of it or nothing, within the budget."""
        if len(data) > self._most:
            return
        with self._lock:
            self._held[name] = data
            while sum(map(len, self._held.values())) > self._most:
                self._held.popitem(last=False)

    def touch(self, names: Sequence[bytes]) -> None:
        """A use of each: the least recently used go first."""
        with self._lock:
            for name in names:
                if name in self._held:
                    self._held.move_to_end(name)

    def reject(self, name: bytes) -> None:
        """What was read is wrong."""
        with self._lock:
            self._held.pop(name, None)

    def stats(self) -> dict[str, int]:
        """What there is."""
        with self._lock:
            return {{"blocks": len(self._held), "bytes": sum(map(len, self._held.values()))}}

    def close(self) -> None:
        """The end."""
'''

COMPONENT = f'''{HEAD}from typing import Any

from phloem.batch import IntArray
from phloem.components import Component, Run, TreeNode
from phloem.interfaces import PluginContext
from pydantic import BaseModel, ConfigDict, Field


class $cls(Component):
    """What it does, in one line: `phloem plugins` shows it. What is not replaced is as in `window`."""

    class Options(BaseModel):
        """Options of `use: $name`; the text under a field is its documentation."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        beginning: int = Field(default=64, ge=0)
        """Tokens at the beginning of a text that count as used when they come."""

    def __init__(self, options: Any, context: PluginContext) -> None:
        super().__init__(options, context)
        self._beginning: int = options.beginning

    def add(self, node: TreeNode, slots: IntArray) -> Run:
        """Slots have come to a node that had none."""
        run = super().add(node, slots)
        if node.start < self._beginning:
            self.use(run, self.tree.clock)
        return run
'''
