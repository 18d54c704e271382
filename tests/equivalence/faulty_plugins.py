"""Plugins that break on purpose."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.constraint import Constraint
from phloem.hooks import hookimpl
from phloem.interfaces import AttentionStep, PluginContext
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.pool import KVStore
from phloem.request import Request
from phloem.testing.toy_grammar import ToyGrammar, ToyMatcher


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


class Plain(TorchAttention):
    """The reference kernel without windows or trees, and for some page sizes only, by its own word."""

    capabilities = frozenset({"gqa"})
    page_sizes = (1, 4)


class Slow(TorchAttention):
    """The reference kernel, a little late: the host is ahead of the device, as on a GPU."""

    def prepare(self, batch: Batch, kv: KVStore) -> AttentionStep:
        time.sleep(0.004)
        return super().prepare(batch, kv)


class Raises:
    """A policy that orders `good` queues and fails on every later one, or that fails to name a victim."""

    api = 1
    capabilities = frozenset[str]()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        good: int = 1

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.good, self.calls = options.good, 0

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        self.calls += 1
        if self.calls > self.good:
            raise ValueError("no order today")
        return waiting

    def victim(self, running: Sequence[Request]) -> Request | None:
        raise KeyError("no victim today")


class FickleMatcher(ToyMatcher):
    """Refuses its third token although its mask allowed it, or raises there."""

    taken = 0
    raises = False

    def accept(self, token: int) -> bool:
        self.taken += 1
        if self.taken < 3:
            return super().accept(token)
        if self.raises:
            raise LookupError("lost its place")
        return False


class Fickle(ToyGrammar):
    """The toy grammar with matchers that break in the middle; a regex that begins with `x` makes them raise."""

    def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
        good = super().matcher(constraint, compiled)
        if constraint.value == "[a-z]{9}":
            return good
        bad = FickleMatcher("x", [], ())
        bad.__dict__.update(good.__dict__)
        bad.raises = constraint.value.startswith("x")
        return bad


class BadObserver:
    """Raises whenever it is called."""

    api = 1
    capabilities = frozenset[str]()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    @hookimpl
    def start(self) -> None:
        raise ZeroDivisionError("start")

    @hookimpl
    def step(self) -> None:
        raise ZeroDivisionError("step")

    @hookimpl
    def request(self) -> None:
        raise ZeroDivisionError("request")

    @hookimpl
    def stop(self) -> None:
        raise ZeroDivisionError("stop")
