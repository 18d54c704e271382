"""Declared siblings: every distinct prefix is computed once, whatever the order of arrival."""

from __future__ import annotations

import itertools
import random

import pytest
from test_scheduler import Bench, text

from phloem.request import State


def minimum(prompts: list[list[int]]) -> int:
    """Design §3: each distinct prefix once (a prompt's last token apart), and each prompt's last token."""
    return len({tuple(p[:i]) for p in prompts for i in range(1, len(p))}) + len(prompts)


def least(prompts: list[list[int]]) -> int:
    """What a perfect schedule runs: a last token that others begin with is not run again by them."""
    whole = {tuple(p) for p in prompts}
    inner = {tuple(p[:i]) for p in prompts for i in range(1, len(p))}
    return len(inner | whole) + len(prompts) - len(whole)


FORK = [[*text(0, 9), 800 + i] for i in range(4)]  # shorter than 16 tokens
TREE = [[*text(0, 5), 900 + i, *text(9, 6), 800 + j, 7] for i in range(3) for j in range(3)]
UNEVEN = [text(0, 30), [*text(0, 30), 1], [*text(0, 12), 2, 3], text(0, 30) + text(3, 20), text(5, 8)]


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("prompts", [FORK, TREE, [FORK[0]] * 5], ids=["fork", "tree", "same"])
def test_minimum_in_any_order(prompts: list[list[int]], together: bool, policy: str, chunk: int) -> None:
    for seed in range(6):
        bench = Bench(policy=policy, chunk=chunk)
        order = prompts[::-1] if seed == 0 else random.Random(seed).sample(prompts, len(prompts))
        for prompt in order:
            bench.add(prompt, out=2, group="g")
            if not together:
                bench.step()
        bench.drain()
        assert bench.prefilled == minimum(prompts)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7])
def test_a_prompt_that_others_begin_with_runs_first(order: tuple[int, ...]) -> None:
    bench = Bench()
    for i in order:
        bench.add(UNEVEN[i], out=2, group="g")
    bench.drain()
    assert bench.prefilled == least(UNEVEN) == minimum(UNEVEN) - 1


def test_pages_round_down() -> None:
    bench = Bench(page=4)
    for prompt in FORK:
        bench.add(prompt, group="g")
    bench.drain()
    assert bench.prefilled == 8 + 4 * 2


@pytest.mark.parametrize(("shared", "waits"), [(1, False), (2, False), (3, True)])
def test_a_fiftieth_of_a_prompt_is_not_worth_a_step(shared: int, waits: bool) -> None:
    bench = Bench()
    prompts = [[*text(0, shared), 800 + i, *text(i + 1, 120 - shared)] for i in range(4)]
    requests = [bench.add(prompt, out=2, group="g") for prompt in prompts]
    bench.step()
    assert [request.state for request in requests[1:]] == [State.WAITING if waits else State.RUNNING] * 3
    bench.drain()
    assert bench.prefilled <= 1.02 * minimum(prompts)


def test_undeclared_short_prefixes_do_not_wait() -> None:
    """A step's delay is not worth a few tokens, unless the caller says so."""
    for groups in ([None, None], ["a", "b"], ["a", None]):
        bench = Bench()
        requests = [bench.add(prompt, group=group) for prompt, group in zip(FORK, groups, strict=False)]
        bench.step()
        assert all(request.state is State.RUNNING for request in requests), groups


def test_other_groups_keep_the_policys_order() -> None:
    bench = Bench(policy="fcfs", max_running=1)
    for group, length in (("a", 20), (None, 30), ("b", 8), ("a", 10), ("b", 4)):
        bench.add(text(length, length), out=1, group=group)
    bench.drain()
    assert bench.order == ["r4/0", "r1/0", "r2/0", "r5/0", "r3/0"]
