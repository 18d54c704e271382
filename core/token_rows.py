"""Where drafters keep something of every token: as further layers of the target's KV store, at the target's own slots.

So what they keep is matched, evicted, moved, counted and copied to tiers together with a token's K and V, whatever the
cache is, and splits and matches know nothing of it (design §5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import windows as win
from .batch import Batch
from .drafters import KeepsRows, TokenRows
from .features import at
from .interfaces import Model, PoolGroup
from .model_spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from .pool import KVStore

Named = tuple[str, KeepsRows]


@dataclass(frozen=True, slots=True)
class Lodging:
    """The drafters that keep rows of tokens, and the layers that these take."""

    drafters: tuple[Named, ...]
    running: int  # most requests at a time
    spec: ModelSpec  # the target's, with their layers behind its own
    groups: tuple[PoolGroup, ...]  # the cache's, likewise
    group: int  # theirs: the one whose tokens' slots are kept for longest
    first: int  # the first layer that is theirs
    lost: dict[str, str] = field(default_factory=dict)  # drafters whose rows are incomplete, and why

    @classmethod
    def of(cls, drafters: Sequence[Named], running: int, spec: ModelSpec, groups: Sequence[PoolGroup]) -> Lodging:
        """`groups` are those that the cache asks for. Without drafters everything stays as it is."""
        group, first = win.guide([each.window for each in groups if not each.states]), len(spec.layers)
        more = [replace(layer, group=group) for _, drafter in drafters for layer in drafter.row_layers]
        widened = list(groups)
        own = (*groups[group].layers, *range(first, first + len(more)))
        widened[group] = groups[group]._replace(layers=own)
        whole = replace(spec, layers=(*spec.layers, *more))
        return cls(tuple(drafters), running, whole, tuple(widened), group, first)

    @property
    def scratch(self) -> dict[int, int]:
        """By layer, the rows behind the pool's slots."""
        rows = [drafter.scratch for _, drafter in self.drafters for _ in drafter.row_layers]
        return {self.first + i: each * self.running for i, each in enumerate(rows)}

    def scratch_bytes(self, element_bytes: int) -> list[tuple[str, int, int]]:
        """Of each drafter: its name, so many rows behind the pool, and the bytes of one."""
        return [
            (
                name,
                drafter.scratch * self.running,
                sum(layer.floats_per_token for layer in drafter.row_layers) * element_bytes,
            )
            for name, drafter in self.drafters
        ]

    def attach(self, kv: KVStore, slots: Sequence[int], model: Model, *, branches: bool) -> None:
        """Tell the drafters where their rows are. `slots` are those of the pools, by group."""
        layer, end, window = self.first, slots[self.group], self.groups[self.group].window
        for _, drafter in self.drafters:
            own = range(end, end + drafter.scratch * self.running)
            drafter.attach(TokenRows(kv, layer, self.group, window, own, model, branches))
            layer += len(drafter.row_layers)
        kv.marks, kv.lost = tuple(drafter.fingerprint for _, drafter in self.drafters), self.lost

    def keep(self, batch: Batch, layers: tuple[int, ...], states: torch.Tensor) -> None:
        """A step's query tokens are computed: [T, len(layers), hidden]. Called once a step, on the thread that runs it.

        A drafter that fails here is asked no more: later rows would be made from such as it has not written. Nor is
        anything stored any more that a later life would take for rows of it.
        """
        for name, drafter in self.drafters:
            if name not in self.lost:
                try:
                    drafter.keep(batch, at(drafter.layers, layers, states))
                except Exception as error:
                    self.lost[name] = f"it kept nothing of a step: {type(error).__name__}: {error}"
