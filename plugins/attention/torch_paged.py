"""Attention `torch`: the readable reference for ragged paged attention, in plain torch operations on any device.

A step's segments are sorted into *pieces* that share one number of queries and nearly one context length. A piece
gathers the K and V rows its segments see into a dense block and attends with `scaled_dot_product_attention`. Heads
that share a KV head are stacked as extra query rows, or broadcast with stride 0; nothing is ever repeated in memory.
A prefix that several segments share is a piece of its own, read once for all their queries, whose results are merged
with those of each segment's rest by log-sum-exp.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.interfaces import PluginContext
from phloem.pool import KVStore

from ._piece import Piece
from ._pieces import Pieces
from ._total import Total


class TorchAttention:
    """Kind `attention`, name `torch`: causal, windowed, soft-capped, grouped and tree-masked; any page size."""

    api = 1
    capabilities = frozenset({"tree_mask", "window", "softcap", "gqa"})

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.options = options

    def prepare(self, batch: Batch, kv: KVStore) -> TorchStep:
        """The step's geometry. Pieces of a state group and window are made at the first layer that asks for them."""
        return TorchStep(batch, kv)


class TorchStep:
    """Attention of one step, called once per layer."""

    def __init__(self, batch: Batch, kv: KVStore) -> None:
        self._batch = batch
        self._kv = kv
        self._pieces: dict[tuple[int, int | None], list[Piece]] = {}
        self._geometry = Pieces(batch)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write k [T, Hkv, Dk], v [T, Hkv, Dv] to the step's slots; attend with q [T, Hq, Dk]: [T, Hq, Dv]."""
        group = self._kv.group_of[layer]
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        self._kv.write(layer, self._batch.groups[group].out_slots, k.to(keys.dtype), v.to(values.dtype))
        total = Total(q, v.shape[2])
        for piece in self._pieces_of(group, window):
            piece.attend(q, keys, values, total, scale, softcap)
        return total.result()

    def _pieces_of(self, group: int, window: int | None) -> list[Piece]:
        pieces = self._pieces.get((group, window))
        if pieces is None:
            pieces = self._geometry.build(self._batch.groups[group].table, window)
            self._pieces[group, window] = pieces
        return pieces
