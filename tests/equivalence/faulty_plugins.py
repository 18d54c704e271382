"""Plugins that break on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.interfaces import AttentionStep, PluginContext
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.pool import KVStore
from phloem.request import Request


class FailsOnce(TorchAttention):
    """The reference kernel, but its step number `at` raises."""

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        at: int = 1

    def __init__(self, options: Options, context: PluginContext) -> None:
        super().__init__(TorchAttention.Options(), context)
        self.at, self.steps = options.at, 0

    def prepare(self, batch: Batch, kv: KVStore) -> AttentionStep:
        self.steps += 1
        if self.steps == self.at:
            raise RuntimeError("this kernel broke")
        return super().prepare(batch, kv)


class RaisesOnSecond:
    """A policy that orders its first queue and fails on every later one."""

    api = 1
    capabilities = frozenset[str]()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.calls = 0

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("no order today")
        return waiting

    def victim(self, running: Sequence[Request]) -> Request | None:
        return None
