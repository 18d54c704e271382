"""The model that drafts: loaded as any model is, with K and V of its own and a prefix cache of its own over them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from phloem import inputs
from phloem.batch import Plan, Segment
from phloem.errors import ModelError
from phloem.holds import Holds
from phloem.interfaces import Attention, Cache, Model, PluginContext, Quant
from phloem.ledger import Ledger
from phloem.pool import KVStore, SlotPool
from phloem.registry import build

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DraftModel:
    """A model of its own and what it needs to run: slots, attention, and a tree of what it has read before."""

    def __init__(self, path: str, loader: str, dtype: str, device: str, quant: str) -> None:
        """Loads the weights. Raises ModelError."""
        made: Quant = build("quant", quant, PluginContext("quant", quant, device=device, dtype=dtype))
        extras = {"path": path, "quant": made}
        context = PluginContext("model", loader, device=device, dtype=dtype, extras=extras)
        self.model: Model = build("model", loader, context)
        if quant not in ("none", "auto") and "quant" not in self.model.spec.capabilities:
            raise ModelError(f"{path} is loaded by a plugin that keeps its own weights; quant is {quant}")
        if any(group.kind == "recurrent" for group in self.model.spec.groups):
            raise ModelError(
                f"{path} has recurrent layers, whose state a rejected draft has changed: it cannot draft",
                hint="choose a model whose layers all attend",
            )
        self.spec = self.model.spec
        self.device = torch.device(device)
        self._dtype = _DTYPES[self.spec.dtype]
        self.kv_bytes = self.spec.kv_bytes_per_token(self._dtype.itemsize)

    def allocate(self, tokens: int, requests: int) -> None:
        """Take memory for K and V of so many tokens, and room for so many texts at a time."""
        pool = SlotPool(tokens, 1)
        eviction = build("eviction", "lru", PluginContext("eviction", "lru"))
        context = PluginContext("cache", "radix", model=self.spec, pools=(pool,), extras={"eviction": eviction})
        cache: Cache = build("cache", "radix", context)
        layers = [0] * len(self.spec.layers)
        self._kv = KVStore(self.spec, [tokens], layers, self._dtype, self.device)
        holds = Holds(cache, 0, idle_s=0.0)
        self.ledger = Ledger(cache, [pool], self._kv, holds, rows=requests, context=self.spec.context_length)
        context = PluginContext("attention", "auto", model=self.spec, device=str(self.device))
        self._attention: Attention = build("attention", "auto", context)

    @torch.inference_mode()
    def run(self, segments: Iterable[Segment]) -> torch.Tensor:
        """One pass over all segments: logits [N, draft vocab] after those that sample, in order."""
        plan = Plan()
        for segment in segments:
            plan.add(segment)
        batch = inputs.build(plan, self.ledger.table, self.device)
        hidden = self.model.forward(batch, self._attention.prepare(batch, self._kv))
        for segment in plan.segments:
            segment.request.computed += segment.count
        return self.model.logits(hidden.index_select(0, batch.logits_rows))
