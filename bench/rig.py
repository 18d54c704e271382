"""Scheduler, ledger, cache and policy as an engine has them, without a model: every sampled token is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phloem.config_sections import ScheduleSection
from phloem.holds import Holds
from phloem.interfaces import PluginContext
from phloem.ledger import Ledger
from phloem.messages import GenerateCall
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.params import SamplingParams
from phloem.pool import KVStore, SlotPool
from phloem.registry import Registry
from phloem.request import Request
from phloem.scheduler import Scheduler


class Rig:
    """Requests run as in an engine, one call of `step` a step; `prefilled` counts prompt tokens run."""

    def __init__(
        self,
        policy: str,
        *,
        pool: int,
        context: int,
        page_size: int = 1,
        options: dict[str, Any] | None = None,
        **limits: int,
    ) -> None:
        registry = Registry()
        spec = ModelSpec("rig", 1 << 17, context, (LayerSpec(1, 1, 1),))
        slots = SlotPool(pool // page_size, page_size)
        given = PluginContext("cache", "radix", model=spec, pools=(slots,), page_size=page_size)
        rule, cached, chosen = (
            registry.load(*name) for name in (("eviction", "lru"), ("cache", "radix"), ("schedule", policy))
        )
        given.extras["eviction"] = rule(rule.Options(), given)
        cache = cached(cached.Options(), given)
        made = chosen(
            chosen.Options(**(options or {})), PluginContext("schedule", policy, model=spec, page_size=page_size)
        )
        if "listens" in made.capabilities:
            cache.listen(made)
        kv = KVStore(spec, [pool], [0], torch.float32, torch.device("cpu"))
        holds = Holds(cache, 0, idle_s=0.0)
        self.ledger = Ledger(cache, [slots], kv, holds, rows=limits["max_running"], context=min(pool, context))
        section = ScheduleSection.model_validate(limits)
        self.scheduler = Scheduler(self.ledger, made, section, lambda wants: [None for _ in wants], lambda r: False, 0)
        self.written: Callable[[Request], int] = lambda request: 7  # the token that a request samples
        self.ends: Callable[[Request], bool] = lambda request: False  # before its limit
        self.arrivals = self.prefilled = self.recomputed = self.finished = self.generated = 0
        self.started: list[Request] = []
        self._reached: dict[Request, int] = {}  # tokens computed at most

    def add(self, prompt: list[int], output: int) -> Request:
        """A request arrives."""
        self.arrivals += 1
        call = GenerateCall(call_id=str(self.arrivals), prompt=prompt, params=SamplingParams(max_tokens=output))
        request = Request(call, 0, seed=0, limit=len(prompt) + output, arrival=self.arrivals)
        self.scheduler.add(request)
        return request

    def step(self) -> int:
        """Plan, and book what an executor would have computed; returns the tokens that were run."""
        plan = self.scheduler.plan()
        if self.scheduler.policy_error is not None:
            raise self.scheduler.policy_error
        for segment in plan.segments:
            request = segment.request
            first = segment.start == (request.cached_tokens or 0) and not request.output_len
            if first and not request.retractions:
                self.started.append(request)
            self.recomputed += self._again(request, segment.count)
            request.computed += segment.count
            if segment.start < request.prompt_len:
                self.prefilled += segment.count
                self.ledger.publish(request, request.computed)
            if segment.samples:
                self._write(request)
        return plan.rows

    def _again(self, request: Request, count: int) -> int:
        """Tokens of a segment that had been computed before its request was retracted."""
        done = max(self._reached.get(request, 0) - request.computed, 0)
        self._reached[request] = max(self._reached.get(request, 0), request.computed + count)
        return min(done, count)

    def _write(self, request: Request) -> None:
        request.tokens.append(self.written(request))
        self.generated += 1
        if request.remaining == 0 or self.ends(request):
            request.finish_reason = "stop" if request.remaining else "length"
            self.finished += 1
            del self._reached[request]
            self.scheduler.drop(request, publish=True)

    def drain(self) -> int:
        """Steps until nothing waits or runs."""
        steps = 0
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
            steps += 1
        return steps
