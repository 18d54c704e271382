"""Attention `cpu`: K and V are read where they lie, in C++, each context once per step however many requests share it.

One call per layer: it writes the step's K and V to their slots and attends. What it works through (`_jobs.py`) is made
once per step for all layers alike; the kernel and its arithmetic are in `paged.cpp`.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.pool import KVStore

from ._jobs import make_jobs
from ._kernel import Kernel, Plan

log = logging.getLogger(__name__)


class CpuAttention:
    """Kind `attention`, name `cpu`: a C++ kernel, compiled once per machine; all that `torch` can, on CPUs only."""

    api = 1
    capabilities = frozenset({"tree_mask", "window", "softcap", "gqa"})

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Compiles the kernel where that was not done before, a few seconds; raises PluginError where it cannot be."""
        if reason := _elsewhere(context):
            raise PluginError(f"attention plugin 'cpu' {reason}", hint="say `attention: torch`")
        self.options = options
        self.kernel = Kernel()
        self.tree_unit = self.kernel.span  # see `Attention`

    @classmethod
    def suits(cls, context: PluginContext) -> str | None:
        """None, or why `auto` means another: no CPU, or no compiler, of which the log is told."""
        if reason := _elsewhere(context):
            return reason
        try:
            Kernel()
        except PluginError as error:
            log.warning("attention runs on torch, which copies K and V and is slower: %s", error)
            return error.message
        return None

    def prepare(self, batch: Batch, kv: KVStore) -> CpuStep:
        """The step's geometry; the jobs of layers that are alike are made at the first of them."""
        return CpuStep(self.kernel, batch, kv)


def _elsewhere(context: PluginContext) -> str | None:
    device = torch.device(context.device).type
    return None if device == "cpu" else f"is for CPUs, not for {device}"


class CpuStep:
    """Attention of one step, called once per layer."""

    def __init__(self, kernel: Kernel, batch: Batch, kv: KVStore) -> None:
        self._kernel = kernel
        self._batch = batch
        self._kv = kv
        self._plans: dict[tuple[object, ...], Plan] = {}

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
        """Write k [T, Hkv, Dk], v [T, Hkv, Dv] to the step's slots; attend with q [T, Hq, Dk]: [T, Hq, Dv].

        Computes in float32, whatever is stored.
        """
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        plan = self._plan(self._kv.group_of[layer], window, q.shape[1], keys, values)
        query, key, value = _rows(q, torch.float32), _rows(k, keys.dtype), _rows(v, values.dtype)
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2])
        size = keys.element_size()
        self._kernel.attend(
            ctypes.byref(plan), query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0) * size,
            value.data_ptr(), value.stride(0) * size, keys.data_ptr(), values.data_ptr(), out.data_ptr(), scale,
            softcap or 0.0,
        )  # fmt: skip
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def _plan(self, group: int, window: int | None, heads: int, keys: torch.Tensor, values: torch.Tensor) -> Plan:
        kv_heads, widths = keys.shape[1], (keys.shape[2], values.shape[2])
        key = (group, window, heads, kv_heads, widths)
        plan = self._plans.get(key)
        if plan is None:
            slots = self._batch.groups[group]
            table = slots.table.numpy()
            jobs = make_jobs(self._batch, table, window, heads // kv_heads, self._kernel.span)
            plan = self._kernel.plan(jobs, table, slots.out_slots.contiguous(), (heads, kv_heads), widths, keys.dtype)
            self._plans[key] = plan
        return plan


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, H, D] in this dtype, the elements of each token side by side."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
