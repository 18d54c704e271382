"""Conformance of kind `schedule`: a policy returns permutations, changes nothing, and starves nobody it vouched for.

class TestMine(ScheduleSuite):
    plugin = MyPolicy
    max_overtakes = 100
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from ..interfaces import PluginContext, Policy
from ..messages import GenerateCall
from ..params import SamplingParams
from ..request import Request
from .plugin import PluginSuite


class FakePolicy:
    """The simplest policy, for tests of what uses one: arrival order, and the latest is the victim."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """As they came."""
        return sorted(waiting, key=lambda request: request.arrival)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The latest."""
        return max(running, key=lambda request: request.arrival)


def waiting_request(arrival: int, *, prompt: int = 8, matched: int = 0, priority: int = 0) -> Request:
    """A request that waits: `prompt` tokens, of which `matched` are cached."""
    params = SamplingParams(max_tokens=16)
    text = [arrival % 7, *[1] * (prompt - 1)]
    call = GenerateCall(call_id=f"call{arrival}", prompt=text, params=params, priority=priority)
    call.arrival_s = float(arrival)
    request = Request(call, 0, seed=arrival, limit=prompt + 16, arrival=arrival)
    request.matched = matched
    return request


def crowd(count: int, seed: int = 0) -> list[Request]:
    """Waiting requests of all sorts, in arrival order."""
    rng = random.Random(seed)
    requests = []
    for arrival in range(count):
        prompt = rng.choice([1, 7, 64, 1000])
        matched = rng.choice([0, 0, prompt - 1])
        requests.append(waiting_request(arrival, prompt=prompt, matched=matched, priority=rng.choice([0, 0, 5, -5])))
    return requests


class Queue:
    """A policy and the requests that wait under it, told of them as the scheduler tells it."""

    def __init__(self, policy: Any, waiting: Sequence[Request]) -> None:
        self.policy, self.waiting = policy, list(waiting)
        self.told = "queue" in policy.capabilities
        for request in waiting if self.told else ():
            policy.add(request)

    def add(self, request: Request) -> None:
        """A request comes, or comes back."""
        self.waiting.append(request)
        if self.told:
            self.policy.add(request)

    def remove(self, request: Request) -> None:
        """A request starts or ends."""
        self.waiting.remove(request)
        if self.told:
            self.policy.remove(request)

    def read(self) -> Iterator[Request]:
        """The order, as far as it is read; who left since a policy was given its list is passed over."""
        given = [] if self.told else list(self.waiting)
        return (r for r in self.policy.order(given) if self.told or r in self.waiting)

    def order(self) -> list[Request]:
        """The whole order."""
        return list(self.policy.order([] if self.told else self.waiting))


class ScheduleSuite(PluginSuite):
    """Set `max_overtakes` if the policy promises that no request is overtaken by more later ones than that."""

    kind = "schedule"
    max_overtakes: ClassVar[int | None] = None

    def policy(self) -> Policy:
        """`make`, typed."""
        policy: Policy = self.make()
        return policy

    @pytest.mark.parametrize("count", [0, 1, 2, 50])
    @pytest.mark.parametrize("seed", range(5))
    def test_order_is_a_permutation(self, count: int, seed: int) -> None:
        """Every waiting request appears exactly once."""
        waiting = crowd(count, seed)
        ordered = Queue(self.policy(), waiting).order()
        assert sorted(map(id, ordered)) == sorted(map(id, waiting)), "a request was lost, repeated or invented"

    def test_order_changes_nothing(self) -> None:
        """Neither the list nor the requests are touched."""
        queue = Queue(self.policy(), crowd(40))
        before = list(queue.waiting), [_state(request) for request in queue.waiting]
        queue.order()
        assert before == (queue.waiting, [_state(request) for request in queue.waiting])

    def test_order_is_stable(self) -> None:
        """Asked twice about the same requests, the same policy answers the same."""
        queue = Queue(self.policy(), crowd(40))
        assert [r.id for r in queue.order()] == [r.id for r in queue.order()]

    def test_two_of_a_kind_agree(self) -> None:
        """The order depends on the requests and the options alone."""
        assert [r.id for r in Queue(self.policy(), crowd(40)).order()] == [
            r.id for r in Queue(self.policy(), crowd(40)).order()
        ]

    @pytest.mark.parametrize("seed", range(5))
    def test_an_order_half_read_loses_nobody(self, seed: int) -> None:
        """The scheduler reads as far as requests start; who starts, comes or returns meanwhile is counted right."""
        rng = random.Random(seed)
        queue = Queue(self.policy(), crowd(30, seed))
        returning: list[Request] = []
        for turn in range(40):
            seen: set[Request] = set()
            for request in queue.read():
                assert request in queue.waiting, f"turn {turn}: {request.id} does not wait"
                assert request not in seen, f"turn {turn}: {request.id} is named twice"
                seen.add(request)
                if rng.random() < 0.5:
                    queue.remove(request)
                    returning.append(request)
                if returning and rng.random() < 0.2:
                    back = returning.pop(0)  # retracted: it keeps its arrival, and may be named again
                    queue.add(back)
                    seen.discard(back)
                if rng.random() < 0.3:
                    break
            assert {*queue.order()} == {*queue.waiting}

    @pytest.mark.parametrize("count", [1, 2, 17])
    def test_victim_is_running(self, count: int) -> None:
        """The victim is one of the running requests, or nobody."""
        running = crowd(count)
        victim = self.policy().victim(running)
        assert victim is None or any(victim is request for request in running)

    @pytest.mark.parametrize("prompt", [1, 1000])
    def test_nobody_starves(self, prompt: int) -> None:
        """However attractive later requests are, the first one's turn comes within `max_overtakes` of them."""
        if self.max_overtakes is None:
            pytest.skip("the policy makes no promise about overtaking")
        first = waiting_request(0, prompt=prompt, priority=-5)
        queue = Queue(self.policy(), [first])
        for overtakes in range(self.max_overtakes + 1):
            arrival = overtakes + 1
            rival = waiting_request(arrival, prompt=1 if prompt > 1 else 1000, matched=999 * (prompt == 1), priority=5)
            queue.add(rival)
            if next(iter(queue.read())) is first:
                return
            queue.remove(rival)
        pytest.fail(f"overtaken {self.max_overtakes + 1} times")


def _state(request: Request) -> tuple[object, ...]:
    fields = (request.matched, request.state, request.deferred, request.computed, request.retractions, request.row)
    return (*fields, request.tokens.tobytes(), request.call)
