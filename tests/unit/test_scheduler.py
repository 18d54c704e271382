"""The scheduler with a real ledger and cache, and an executor that only counts: budgets, order, fairness, memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from phloem.config_sections import ScheduleSection
from phloem.drafts import Draft
from phloem.holds import Holds
from phloem.interfaces import PluginContext
from phloem.ledger import Ledger
from phloem.messages import GenerateCall
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.params import SamplingParams
from phloem.parking import MAX_DEFERRED_STEPS
from phloem.plugins.cache.chunk import ChunkCache
from phloem.plugins.cache.eviction import Lru
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.schedule.dfs_weight import DfsWeight
from phloem.plugins.schedule.fcfs import Fcfs
from phloem.plugins.schedule.hrrn import Hrrn
from phloem.plugins.schedule.lof import Lof
from phloem.plugins.schedule.lpm import Lpm
from phloem.plugins.schedule.priority import Priority
from phloem.plugins.schedule.random import Random
from phloem.plugins.schedule.routing_key import RoutingKey
from phloem.plugins.schedule.shortest_prefill import ShortestPrefill
from phloem.pool import KVStore, SlotPool
from phloem.request import Request, State
from phloem.scheduler import Scheduler

SPEC = ModelSpec("toy", 1000, 4096, (LayerSpec(1, 2, 2),))
POLICIES: dict[str, type[Any]] = {
    "lpm": Lpm,
    "fcfs": Fcfs,
    "dfs-weight": DfsWeight,
    "hrrn": Hrrn,
    "lof": Lof,
    "priority": Priority,
    "random": Random,
    "routing-key": RoutingKey,
    "shortest-prefill": ShortestPrefill,
}


class Bench:
    """A scheduler and the bookkeeping of an executor: every sampled token is 7."""

    def __init__(
        self,
        *,
        pool: int = 1024,
        page: int = 1,
        cache: str = "radix",
        policy: str = "lpm",
        options: dict[str, Any] | None = None,
        **limits: int,
    ):
        slots = SlotPool(pool // page, page)
        context = PluginContext("cache", cache, model=SPEC, pools=(slots,), page_size=page)
        context.extras["eviction"] = Lru(Lru.Options(), context)
        made = RadixCache if cache == "radix" else ChunkCache
        kv = KVStore(SPEC, [pool], [0], torch.float32, torch.device("cpu"))
        budgets = {"max_tokens_per_step": 256, "chunk": 64, "max_running": 8, "max_waiting": 100_000, **limits}
        plugin = POLICIES[policy]
        if options is None:
            options = {"max_overtakes": 64} if policy == "lpm" else {}
        chosen = plugin(plugin.Options(**options), context)
        cached = made(made.Options(), context)
        if "listens" in chosen.capabilities:
            cached.listen(chosen)
        holds = Holds(cached, 0, idle_s=0.0)
        self.ledger = Ledger(cached, [slots], kv, holds, rows=budgets["max_running"], context=pool)
        self.scheduler = Scheduler(
            self.ledger, chosen, ScheduleSection(**budgets), lambda wants: [None for _ in wants], lambda r: False, 0
        )
        self.count = 0
        self.prefilled = 0
        self.order: list[str] = []  # requests in the order in which they started

    def add(self, prompt: list[int], out: int = 4, **call: object) -> Request:
        self.count += 1
        made = GenerateCall(call_id=f"r{self.count}", prompt=prompt, params=SamplingParams(max_tokens=out), **call)
        request = Request(made, 0, seed=0, limit=len(prompt) + out, arrival=self.count)
        self.scheduler.add(request)
        return request

    def step(self) -> int:
        before = set(self.scheduler.running)
        plan = self.scheduler.plan()
        self.order += [r.id for r in self.scheduler.running if r not in before and r.output_len == 0]
        assert plan.rows <= self.scheduler.limits.max_tokens_per_step
        assert len(self.scheduler.running) <= self.scheduler.limits.max_running
        for segment in plan.segments:
            request = segment.request
            assert segment.start == request.computed
            assert request.capacity >= segment.start + segment.count
            assert segment.count <= self.scheduler.limits.chunk
            request.computed += segment.count
            if segment.start < request.prompt_len:
                self.prefilled += segment.count
                self.ledger.publish(request, request.computed)
            if segment.samples:
                request.tokens.append(7)
                if request.remaining == 0:
                    self.scheduler.drop(request, publish=True)
        self.ledger.check(self.scheduler.running)
        return plan.rows

    def drain(self, most: int = 5000) -> int:
        for steps in range(most):
            if not self.scheduler.running and not self.scheduler.waiting:
                return steps
            self.step()
        raise AssertionError("the queue does not drain")


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cache", ["radix", "chunk"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everything_finishes_in_a_pool_that_forces_retraction(policy: str, cache: str, page: int) -> None:
    bench = Bench(pool=128, page=page, cache=cache, policy=policy)
    requests = [bench.add(text(i, 10 + i % 7), out=40 + i % 5) for i in range(20)]
    bench.drain()
    assert all(r.state is State.FINISHED and r.remaining == 0 for r in requests)
    assert bench.scheduler.retractions > 0


def test_a_lone_request_may_fill_the_whole_pool() -> None:
    """what-breaks 20: the last request cannot be retracted."""
    bench = Bench(pool=64)
    bench.add(text(1, 30), out=34)
    bench.drain()


def test_shared_prefix_is_computed_once_when_all_arrive_together() -> None:
    prefix = text(0, 200)
    bench = Bench(pool=8192, max_running=64)
    for i in range(64):
        bench.add(prefix + text(i + 1, 10))
    bench.drain()
    assert bench.prefilled <= 200 + 64 * 10 + 64


def test_waiting_for_a_prefix_ends_when_its_owner_is_gone() -> None:
    prefix = text(0, 200)
    bench = Bench(pool=8192)
    first = bench.add([*prefix, 1])
    second = bench.add([*prefix, 2])
    bench.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    bench.scheduler.drop(first, publish=False)
    bench.step()
    assert second.state is State.RUNNING


def test_waiting_for_a_prefix_is_bounded() -> None:
    bench = Bench(pool=8192)
    first = bench.add(text(0, 200))
    second = bench.add(text(0, 200))
    bench.step()
    steps = 0
    while second.state is State.WAITING:
        first.computed = 0  # an owner that never gets on
        bench.scheduler.plan()
        steps += 1
        assert steps <= MAX_DEFERRED_STEPS
    assert steps == second.deferred == MAX_DEFERRED_STEPS


def test_namespaces_do_not_wait_for_each_other() -> None:
    bench = Bench(pool=8192)
    bench.add(text(0, 200), salt="a")
    other = bench.add(text(0, 200), adapter="a")
    bench.step()
    assert other.state is State.RUNNING
    assert other.matched == 0


def test_lpm_runs_the_longest_match_first_and_fcfs_does_not() -> None:
    for policy, expected in (("lpm", ["r1/0", "r3/0", "r2/0"]), ("fcfs", ["r1/0", "r2/0", "r3/0"])):
        bench = Bench(pool=4096, policy=policy, max_running=1)
        hot = text(0, 100)
        bench.add(hot)
        bench.drain()
        bench.add(text(9, 100))
        bench.add([*hot, 1, 2, 3])
        bench.drain()
        assert bench.order == expected, policy


def test_no_request_is_overtaken_by_more_than_the_bound() -> None:
    """what-breaks 22: A stream of hot-prefix requests against one cold one (max_overtakes is 64 here)."""
    bench = Bench(pool=8192, max_running=1, chunk=256)
    hot = text(0, 200)
    bench.add(hot, out=1)
    bench.drain()
    cold = bench.add(text(99, 50), out=1)
    overtakers = 0
    while cold.state is State.WAITING:
        bench.add([*hot, 1 + overtakers], out=1)
        bench.step()
        overtakers += 1
        assert overtakers < 200
    assert overtakers <= 64


class Drafts:
    """A drafter that always fills its budget, and what it was asked."""

    def __init__(self, bench: Bench, most: int = 4) -> None:
        bench.scheduler.propose, bench.scheduler.draft_tokens = self, most
        self.asked: list[tuple[int, int]] = []

    def __call__(self, wants: Sequence[tuple[Request, int]]) -> list[Draft | None]:
        self.asked += [(len(request.tokens), budget) for request, budget in wants]
        return [Draft.chain([7] * budget) for _, budget in wants]


def drafted(bench: Bench) -> list[tuple[int, int]]:
    """(tokens, draft nodes) of the next step's segments."""
    return [(segment.count, len(segment.draft or ())) for segment in bench.scheduler.plan().segments]


def test_the_last_chunk_of_a_prompt_carries_a_draft() -> None:
    bench = Bench(chunk=64)
    drafts = Drafts(bench)
    request = bench.add(text(1, 150), out=40)
    seen = []
    for _ in range(3):
        seen += drafted(bench)
        request.computed += 64
    assert seen == [(64, 0), (64, 0), (22, 4)]
    assert drafts.asked == [(150, 4)]
    assert request.capacity == 154


@pytest.mark.parametrize(("out", "nodes"), [(1, 0), (2, 1), (9, 4)])
def test_a_prompts_draft_stays_within_the_output_limit(out: int, nodes: int) -> None:
    bench = Bench()
    Drafts(bench)
    bench.add(text(1, 20), out=out)
    assert drafted(bench) == [(20, nodes)]


@pytest.mark.parametrize(("room", "nodes"), [(20, 0), (22, 2), (60, 4)])
def test_a_prompts_draft_stays_within_the_step(room: int, nodes: int) -> None:
    bench = Bench(max_tokens_per_step=room, chunk=20)
    Drafts(bench)
    bench.add(text(1, 20), out=30)
    assert drafted(bench) == [(20, nodes)]


def test_a_prompts_draft_costs_nobody_its_slots() -> None:
    """A pool with room for the prompt, but not for a draft behind it, beside a running request."""
    bench = Bench(pool=40)
    running = bench.add(text(1, 16), out=8)
    bench.step()
    Drafts(bench)
    bench.scheduler.foresight.remaining = lambda requests: np.zeros(len(requests))  # type: ignore[method-assign]
    bench.add(text(2, 20), out=8)
    bench.scheduler.draft_tokens = 3  # 16 + 1 + 3 for the one, 20 for the other
    assert drafted(bench) == [(1, 3), (20, 0)]
    assert bench.scheduler.retractions == 0
    assert running.state is State.RUNNING


def test_admission_keeps_room_for_the_running() -> None:
    bench = Bench(pool=200, max_running=8)
    for i in range(8):
        bench.add(text(i, 40), out=60)
    bench.step()
    assert len(bench.scheduler.running) < 5  # 5 x 40 prompt tokens would fit, their outputs would not


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equals_do_not_retract_each_other_for_ever(policy: str) -> None:
    """what-breaks 22, 20: the oldest is never retracted, so each finishes in turn and the work redone is bounded."""
    bench = Bench(pool=64, policy=policy)
    requests = [bench.add(text(i, 8), out=56) for i in range(4)]  # each alone fills the pool
    steps = bench.drain()
    assert requests[0].retractions == 0
    assert all(request.remaining == 0 for request in requests)
    assert bench.scheduler.retractions > 0
    assert steps <= 4 * (56 + 10)


def test_who_verifies_what_was_drawn_is_not_retracted() -> None:
    """Its verdict would be void, and whether it comes to that may depend on what was drawn: that would be a bias."""
    bench = Bench(pool=64, policy="priority", options={"preempt_at": 1})
    first, second, third = (bench.add(text(i, 8), out=20, priority=2 - i) for i in range(3))
    bench.step()
    assert bench.scheduler.running == [first, second, third]
    assert bench.scheduler._victim(first) is third
    third.drawn = True
    assert bench.scheduler._victim(first) is second
    second.drawn = True
    assert bench.scheduler._victim(first) is first
    first.drawn = True
    urgent = bench.add(text(9, 40), out=20, priority=9)
    bench.scheduler.plan()
    assert urgent.state is State.WAITING
    assert bench.scheduler.retractions == 0


def test_many_short_requests_leave_nothing_behind() -> None:
    """what-breaks 24: usage returns to zero and the queue stays empty; nothing is kept per request."""
    bench = Bench(pool=256, page=4)
    for i in range(1500):
        bench.add(text(i % 50, 5 + i % 9), out=1 + i % 3)
        if i % 8 == 0:
            bench.step()
    bench.drain()
    usage = bench.ledger.usage([])[0]
    assert usage["leased"] == usage["protected"] == 0
    assert usage["free"] + usage["evictable"] == 256
    assert bench.ledger.table.free == 8


def test_a_policy_that_loses_requests_is_reported() -> None:
    bench = Bench()
    bench.scheduler.policy.order = lambda waiting: []  # type: ignore[method-assign]
    bench.add(text(0, 5))
    bench.scheduler.plan()
    assert "permutation" in str(bench.scheduler.policy_error)


@pytest.mark.parametrize(("page", "pool"), [(1, 160), (4, 160), (16, 192), (64, 320)])
def test_random_aborts_at_any_point_return_every_slot(page: int, pool: int) -> None:
    """what-breaks 4, 12: after every step, whole pages are counted once, however they are cut up."""
    rng = random.Random(3)
    bench = Bench(pool=pool, page=page)
    alive: list[Request] = []
    for i in range(300):
        if rng.random() < 0.5:
            alive.append(bench.add(text(i % 9, rng.randint(1, 60)), out=rng.randint(1, 60)))
        if alive and rng.random() < 0.3:
            victim = alive.pop(rng.randrange(len(alive)))
            if victim.state is not State.FINISHED:
                bench.scheduler.drop(victim, publish=rng.random() < 0.5)
        bench.step()
    bench.drain()
    bench.ledger.cache.reset()
    assert bench.ledger.pools[0].free == pool
