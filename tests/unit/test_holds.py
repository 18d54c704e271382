"""Holds: what they lock, for how long, and that everything else goes first."""

from __future__ import annotations

import pytest
from test_scheduler import Bench, text

from phloem.errors import RequestError
from phloem.holds import Holds
from phloem.request import Request, State


class Holding(Bench):
    """A bench whose requests end with `stop`, as the loop's do, and whose holds have a clock of the test's."""

    def __init__(self, *, share: float = 0.5, idle_s: float = 10.0, pool: int = 256, **more: int | str) -> None:
        super().__init__(pool=pool, **more)  # type: ignore[arg-type]
        self.now = 0.0
        self.ledger.holds = Holds(self.ledger.cache, int(share * pool), idle_s=idle_s, clock=lambda: self.now)
        self.holds = self.ledger.holds

    def add(self, prompt: list[int], out: int = 4, **call: object) -> Request:
        request = super().add(prompt, out, **call)
        request.finish_reason = "stop"
        return request

    def locked(self) -> int:
        return self.ledger.cache.counts()[0].protected


@pytest.mark.parametrize("page", [1, 4])
def test_a_finished_call_stays_locked_until_it_is_dropped(page: int) -> None:
    bench = Holding(page=page)
    bench.add(text(0, 30), out=5, hold="a")
    bench.drain()
    held = 34 // page * page  # the last sampled token was not computed
    assert bench.locked() == bench.holds.tokens == held
    assert bench.holds.stats() == {"count": 1, "tokens": held, "revoked": 0, "expired": 0}
    assert bench.holds.drop("a")
    assert not bench.holds.drop("a")
    assert bench.locked() == bench.holds.tokens == 0


def test_a_later_call_of_the_same_name_replaces_it() -> None:
    bench = Holding()
    prompt = text(0, 30)
    bench.add(prompt, hold="a")
    bench.drain()
    bench.add([*prompt, 7, 7, 7, 7, 1, 2], hold="a")
    bench.drain()
    assert bench.locked() == bench.holds.tokens == 39
    assert bench.holds.stats()["count"] == 1


def test_what_holds_share_is_counted_once() -> None:
    bench = Holding(pool=1024)
    prefix = text(0, 100)
    for i in range(5):
        bench.add([*prefix, 900 + i], out=1, hold=f"{i}")
    bench.drain()
    assert bench.locked() == bench.holds.tokens == 105
    for i in range(5):
        bench.holds.drop(f"{i}")
        assert bench.locked() == bench.holds.tokens == (104 - i if i < 4 else 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_call_that_did_not_end_by_itself_leaves_the_older_hold(reason: str) -> None:
    bench = Holding()
    bench.add(text(0, 30), hold="a")
    bench.drain()
    second = bench.add([*text(0, 30), 1, 2, 3], out=20, hold="a")
    bench.step()
    second.finish_reason = reason
    bench.scheduler.drop(second, publish=reason == "abort")
    assert bench.locked() == bench.holds.tokens == 33
    assert bench.holds.stats()["count"] == 1


def test_pressure_takes_the_least_recently_used_first() -> None:
    bench = Holding(pool=256)
    for name in "abc":
        bench.add(text(ord(name), 36), hold=name)
        bench.drain()
    bench.add([*text(ord("a"), 36), 7], out=1, hold="a")  # used again
    bench.drain()
    bench.add(text(9, 100), out=60)
    bench.drain()
    assert bench.scheduler.retractions == 0
    assert bench.holds.stats()["revoked"] == 1
    assert not bench.holds.drop("b")
    assert bench.holds.drop("a")
    assert bench.holds.drop("c")


def test_evictable_state_goes_before_holds() -> None:
    bench = Holding(pool=256)
    bench.add(text(0, 60), hold="a")
    bench.drain()
    for i in range(20):
        bench.add(text(i + 1, 60))
        bench.drain()
    assert bench.holds.stats()["revoked"] == 0
    assert bench.holds.tokens == 63
    cached = bench.add([*text(0, 60), 7, 1], out=1)
    bench.drain()
    assert cached.cached_tokens == 61


@pytest.mark.parametrize("page", [1, 4])
def test_holds_are_given_up_before_anything_is_retracted(page: int) -> None:
    bench = Holding(pool=128, page=page)
    bench.add(text(0, 56), hold="a")
    bench.drain()
    bench.add(text(1, 40), out=60)  # needs more than the hold leaves
    bench.drain()
    assert bench.scheduler.retractions == 0
    assert bench.holds.stats()["revoked"] == 1


def test_a_waiting_request_that_would_fit_does_not_wait_for_holds() -> None:
    bench = Holding(pool=128, share=1.0)
    bench.add(text(0, 70), out=1, hold="a")
    bench.drain()
    bench.add(text(1, 20), out=2)
    second = bench.add(text(2, 60), out=2)
    bench.step()
    assert second.state is State.RUNNING
    assert bench.holds.stats()["revoked"] == 1


def test_holds_are_not_given_up_in_vain() -> None:
    """What would not fit without them either waits, and they stay."""
    bench = Holding(pool=128, share=1.0)
    bench.add(text(0, 20), out=1, hold="a")
    bench.drain()
    bench.add(text(1, 60), out=30)
    second = bench.add(text(2, 100), out=2)
    bench.step()
    assert second.state is State.WAITING
    assert bench.holds.stats()["revoked"] == 0
    bench.drain()


def test_holds_keep_within_their_share() -> None:
    bench = Holding(pool=256, share=0.25)
    for i in range(6):
        bench.add(text(i, 20), out=1, hold=f"{i}")
        bench.drain()
        assert bench.holds.tokens <= 64
    assert bench.holds.stats() == {"count": 3, "tokens": 60, "revoked": 3, "expired": 0}
    bench.add(text(7, 100), out=1, hold="large")
    bench.drain()
    assert bench.holds.stats()["count"] == 0


def test_idle_holds_expire_and_used_ones_do_not() -> None:
    bench = Holding(idle_s=10)
    bench.add(text(0, 20), hold="a")
    bench.add(text(1, 20), hold="b")
    bench.drain()
    bench.now = 9.0
    bench.add([*text(0, 20), 7], out=30, hold="a")
    bench.step()
    bench.now = 11.0
    assert bench.holds.stats()["expired"] == 1
    bench.drain()
    assert bench.holds.stats() == {"count": 1, "tokens": 50, "revoked": 0, "expired": 1}


def test_each_hold_may_have_a_shorter_limit() -> None:
    """In whatever order they are used; a use begins anew, and a later call's limit is the hold's."""
    bench = Holding(idle_s=10)
    for name, idle_s in (("long", None), ("short", 2.0), ("middle", 5.0)):
        bench.add(text(ord(name[0]), 10), out=1, hold=name, hold_idle_s=idle_s)
        bench.drain()
    bench.now = 1.5
    bench.holds.touch("short")
    bench.now = 3.0
    assert bench.holds.stats()["expired"] == 0
    bench.now = 3.6
    assert bench.holds.stats()["expired"] == 1
    bench.add([*text(ord("m"), 10), 7], out=1, hold="middle", hold_idle_s=1.0)
    bench.drain()
    bench.now = 4.7
    assert bench.holds.stats() == {"count": 1, "tokens": 10, "revoked": 0, "expired": 2}
    bench.now = 10.5
    assert bench.holds.stats()["expired"] == 3
    assert not bench.holds._ends


@pytest.mark.parametrize("idle_s", [0.0, -1.0, 10.5, float("nan"), float("inf")])
def test_a_limit_beyond_the_configured_one_is_refused(idle_s: float) -> None:
    bench = Holding(idle_s=10)
    bench.holds.allow(None)
    bench.holds.allow(10.0)
    with pytest.raises(RequestError, match=r"must be above 0 and at most 10 \(schedule.hold_idle_s\)"):
        bench.holds.allow(idle_s)


def test_a_cache_that_shares_nothing_holds_nothing() -> None:
    bench = Holding(cache="chunk")
    bench.add(text(0, 20), hold="a")
    bench.drain()
    assert bench.holds.stats()["count"] == 0


def test_a_flush_takes_holds_along() -> None:
    bench = Holding()
    bench.add(text(0, 20), hold="a")
    bench.drain()
    bench.holds.clear()
    bench.ledger.cache.reset()
    assert bench.ledger.pools[0].free == 256
