"""How many draft nodes pay: by cost, by a request's own acceptance; who is asked at all; and hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sampling_rig as rig

from phloem import Engine
from phloem import drafting as module
from phloem.batch import StepStats
from phloem.deadline import Deadline
from phloem.draft_cost import VerifyCost, profile
from phloem.draft_size import Sizer
from phloem.drafting import Drafting
from phloem.drafts import Draft, merge
from phloem.draws import Dice
from phloem.params import SamplingParams
from phloem.request import Request

FLAT = [(1, 1.0), (128, 1.01)]  # a memory-bound machine: rows are free
STEEP = [(1, 1.0), (128, 128.0)]  # a compute-bound one: two rows take twice as long


class Toy:
    """Proposes what it is given."""

    capabilities = frozenset({"inline"})

    def __init__(self, draft: Draft | None, seconds: float = 0.0) -> None:
        self.draft, self.seconds, self.asked = draft, seconds, 0

    def propose(self, context: Any, budget: int) -> Draft | None:
        self.asked += 1
        time.sleep(self.seconds)
        return self.draft

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def sized(times: Sequence[tuple[int, float]], *drafters: Any) -> tuple[Drafting, VerifyCost]:
    made = Drafting([(f"toy{i}", drafter) for i, drafter in enumerate(drafters)], rig.VOCAB)
    cost = VerifyCost(times)
    made.sizer = Sizer(cost)
    return made, cost


def request() -> Request:
    return rig.make_request(SamplingParams(max_tokens=10_000), (1,))


def chain(*tokens: int, sure: float = 0.9) -> Draft:
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), confidence=(sure,) * len(tokens))


# --- cost


def test_rows_that_are_free_are_all_used_and_dear_ones_not_at_all() -> None:
    values = [0.9**i for i in range(1, 17)]
    assert VerifyCost(FLAT).worth(values)[0] == 16
    assert VerifyCost(STEEP).worth(values)[0] == 0
    assert 0 < VerifyCost([(1, 1.0), (128, 40.0)]).worth(values)[0] < 16


def test_a_step_in_cost_is_not_taken_for_little() -> None:
    """Products have tiles: up to eight rows cost as much as one, the ninth as much as eight more."""
    cost = VerifyCost([(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0)])
    assert cost.worth([0.5**i for i in range(1, 17)])[0] == 7
    assert VerifyCost([(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0)]).worth([0.97**i for i in range(1, 16)])[0] == 15


def test_a_large_batch_leaves_no_room_for_drafts() -> None:
    cost = VerifyCost([(1, 1.0), (16, 1.1), (32, 2.0), (64, 4.0), (128, 8.0)])
    nodes = []
    for requests in (1, 64):
        cost.requests = cost.rows = requests
        nodes.append(cost.worth([0.8**i for i in range(1, 9)])[0])
    assert nodes == [8, 0]


def test_drafts_of_one_step_share_what_is_cheap() -> None:
    """The rows that one request was granted are there when the next one asks."""
    cost = VerifyCost([(1, 1.0), (8, 1.0), (9, 3.0), (64, 30.0)])
    cost.requests = cost.rows = 2
    assert [cost.worth([0.9] * 4)[0], cost.worth([0.9] * 4)[0]] == [4, 2]
    cost.measured(StepStats(requests=2, forward_tokens=8, draft_tokens=6, decode_tokens=2))
    assert cost.worth([0.9] * 4)[0] == 4


def test_times_in_use_replace_those_of_the_start() -> None:
    cost = VerifyCost(FLAT)
    for _ in range(60):
        cost.observe(1, 0, 1, 1.0)
        cost.observe(1, 7, 1, 8.0)
    assert cost.plain_s(1) == pytest.approx(1.0, rel=0.2)
    assert cost.drafted_s(8) == pytest.approx(8.0, rel=0.2)
    assert cost.pays([0.9] * 7) == 0


def test_steps_that_bring_less_make_it_cautious_and_it_recovers() -> None:
    values = [0.5] * 3
    cost = VerifyCost([(1, 1.0), (4, 1.45), (128, 60.0)])
    assert cost.pays(values) == 3
    for _ in range(120):
        cost.observe(1, 3, 1, 1.45)  # nothing is ever accepted
    assert cost.pays(values) == 0
    for _ in range(1500):
        cost.observe(1, 0, 1, 1.0)
    assert cost.pays([0.99] * 3) == 3


@pytest.mark.parametrize("stats", [StepStats(requests=1, forward_tokens=40, prefill_tokens=39, decode_tokens=1)])
def test_steps_with_prompts_tell_no_time(stats: StepStats) -> None:
    cost = VerifyCost(FLAT)
    before = cost.plain_s(1), cost.drafted_s(40)
    cost.measured(stats)
    cost.measured(stats)
    assert (cost.plain_s(1), cost.drafted_s(40)) == before
    assert cost.rows == 40


def test_time_without_anything_to_do_is_no_time_of_a_step() -> None:
    step = StepStats(requests=1, forward_tokens=1, decode_tokens=1)
    cost = VerifyCost([(1, 1e-3), (128, 1e-3)])
    before = cost.plain_s(1)
    cost.measured(step)
    cost.idled()
    time.sleep(0.02)
    cost.measured(step)
    assert cost.plain_s(1) == before
    time.sleep(0.02)
    cost.measured(step)
    assert cost.plain_s(1) > before


def test_an_engine_that_waited_tells_no_time_of_it(tiny_model: Callable[[str], Path]) -> None:
    sections: dict[str, Any] = {"cache": {"tokens": 64}, "grammar": "none", "spec": [{"use": "ngram"}]}
    with Engine(str(tiny_model("llama")), **sections) as engine:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=4))
        sizer = engine.core.parts.drafting.sizer
        assert sizer is not None
        engine.stats()  # asked, and answered, by a loop that has nothing else to do
        assert engine.invoke(lambda _: sizer.cost._last).result() is None


def test_an_engine_measures_its_own_rows(tiny_model: Callable[[str], Path]) -> None:
    sections: dict[str, Any] = {"cache": {"tokens": 64}, "grammar": "none", "spec": [{"use": "ngram"}]}
    for arch in ("llama", "gemma3"):
        with Engine(str(tiny_model(arch)), **sections) as engine:
            sizer = engine.core.parts.drafting.sizer
            assert sizer is not None
            assert 0 < sizer.cost.plain_s(1) <= sizer.cost.plain_s(64)
            times = profile(engine.core.parts.executor, 20)
            assert [rows for rows, _ in times] == [1, 2, 4, 8, 16]
            assert len(engine.generate([[5, 6, 7] * 4], SamplingParams(max_tokens=20))[0].token_ids)
    with Engine(str(tiny_model("llama")), **(sections | {"spec": [{"use": "grammar"}]})) as engine:
        assert engine.core.parts.drafting.sizer is None


# --- what a request's own drafts came to


def test_a_draft_shrinks_where_it_is_wrong_and_grows_where_it_is_right() -> None:
    made, _ = sized([(1, 1.0), (16, 4.0), (128, 32.0)], Toy(chain(3, 3, 3, 3, 3, 3)))
    wrong, right = request(), request()
    right.id = "right/0"
    sizes: dict[str, list[int]] = {"wrong": [], "right": []}
    for _ in range(30):
        for name, one, token in (("wrong", wrong, 5), ("right", right, 3)):
            draft = made.propose(one, 6)
            sizes[name].append(len(draft or ()))
            one.tokens.append(token)
            made.measured(StepStats(prefill_tokens=1, requests=1, forward_tokens=1))
    assert sizes["wrong"][-5:] == [0] * 5
    assert sizes["right"][-5:] == [6] * 5
    for _ in range(40):  # and back, though nothing of it was verified meanwhile
        made.propose(wrong, 6)
        wrong.tokens.append(3)
        made.measured(StepStats(prefill_tokens=1, requests=1, forward_tokens=1))
    assert len(made.propose(wrong, 6) or ()) == 6


def test_the_likeliest_nodes_are_kept_whoever_proposed_them() -> None:
    first = Draft((1, 2, 3), (-1, 0, 1), confidence=(0.3, 0.3, 0.3))
    second = Draft((4, 5, 6), (-1, 0, 1), confidence=(0.9, 0.9, 0.9))
    made, _ = sized(FLAT, Toy(first), Toy(second))
    assert made.propose(request(), 4) == Draft(
        (4, 5, 6, 1), (-1, 0, 1, -1), confidence=pytest.approx((0.9, 0.9, 0.9, 0.3), abs=0.01)
    )


def test_the_likeliest_path_lies_first() -> None:
    """So that above page size 1 following it moves no KV."""
    tree = Draft((1, 4, 2, 5, 3), (-1, -1, 1, 2, 0), confidence=(0.2, 0.8, 0.9, 0.9, 0.1))
    made, _ = sized(FLAT, Toy(tree))
    draft = made.propose(request(), 5)
    assert draft is not None
    assert draft.tokens[:3] == (4, 2, 5)
    assert draft.parents[:3] == (-1, 0, 1)


def test_a_drafter_without_confidence_is_judged_by_what_comes_of_it() -> None:
    made, _ = sized([(1, 1.0), (16, 4.0), (128, 32.0)], Toy(Draft.chain([3, 3, 3])))
    one = request()
    assert len(made.propose(one, 3) or ()) == 3
    for _ in range(20):
        one.tokens.append(5)
        made.propose(one, 3)
        made.measured(StepStats(prefill_tokens=1, requests=1, forward_tokens=1))
    assert made.propose(one, 3) is None


def test_sampled_text_is_no_measure_of_greedy_text() -> None:
    """It follows drafts less often: what requests of one kind came to says nothing of a new one of the other."""
    made, _ = sized([(1, 1.0), (16, 4.0), (128, 32.0)], Toy(chain(3, 3, 3, 3, 3, 3)))

    def fresh(name: str, heat: float) -> Request:
        one = rig.make_request(SamplingParams(max_tokens=10_000, temperature=heat), (1,))
        one.id = name
        return one

    for i in range(20):
        for heat, token in ((0.0, 3), (0.7, 5)):
            one = fresh(f"{heat}/{i}", heat)
            made.propose(one, 6)
            one.tokens.append(token)
            made.forget(one)
            made.measured(StepStats(prefill_tokens=1, requests=1, forward_tokens=1))
    sizes = [len(made.propose(fresh(f"new/{heat}", heat), 6) or ()) for heat in (0.0, 0.7)]
    assert sizes[0] == 6
    assert sizes[1] <= 1


def test_what_leads_is_never_cut() -> None:
    leader = Toy(Draft.chain([3, 3, 3]))
    leader.capabilities = frozenset({"leads", "inline"})
    made, _ = sized(STEEP, leader, Toy(chain(4, 4)))
    assert made.propose(request(), 8) == Draft.chain([3, 3, 3])


def test_a_dear_drafter_in_vain_is_asked_seldom() -> None:
    dear, cheap = Toy(None, seconds=0.05), Toy(chain(3, 3))
    made, _ = sized([(1, 1.0), (128, 128.0)], dear, cheap)
    one = request()
    for _ in range(40):
        made.propose(one, 4)
        one.tokens.append(5)
    assert 3 < dear.asked < 20
    assert cheap.asked == 40


def test_the_drafts_of_a_step_together_bring_what_the_first_one_costs() -> None:
    """Among 64 requests a step with any draft takes a fifth longer: one draft is not worth that, thirty are.

    Shared among all requests in advance, one would look cheap; every step would have one, and lose by it.
    """
    made, cost = sized([(1, 0.25), (128, 0.25001)], toy := Toy(chain(3, 3, 3)))
    for _ in range(40):
        cost.observe(64, 8, 66, 0.30)
        cost.observe(64, 0, 64, 0.25)
    step = StepStats(requests=64, forward_tokens=64, prefill_tokens=1)
    made.measured(step)
    assert cost.first_s == pytest.approx(0.05, rel=0.3)
    requests = [request() for _ in range(30)]
    for i, one in enumerate(requests):
        one.id = f"{i}/0"
    wants = [(one, 8) for one in requests]
    assert made.propose_all(wants[:1]) == [None]
    made.measured(step)
    requests[0].tokens.extend([3] * 70)  # its drafter rests, as it was asked in vain
    assert [len(draft or ()) for draft in made.propose_all(wants)] == [3] * 30
    for _ in range(1500):
        cost.observe(64, 0, 64, 0.25)  # what is not tried any more is forgotten, and tried again
    made.measured(step)
    requests[0].tokens.extend([3] * 70)
    assert made.propose_all(wants[:1]) != [None]
    assert toy.asked == 32


@pytest.mark.parametrize(("seconds", "seldom"), [(0.02, True), (0.0, False)])
def test_one_whose_drafts_bring_less_than_asking_is_asked_seldom(seconds: float, seldom: bool) -> None:
    """Among 64 requests a second brings 256 tokens, and 20 ms are five: more than any draft here can bring."""
    made, cost = sized([(1, 0.25), (128, 0.25001)], toy := Toy(chain(3, 3), seconds=seconds))
    one, step = request(), StepStats(requests=64, forward_tokens=64, prefill_tokens=1)
    made.measured(step)
    drafted = 0
    for _ in range(40):
        drafted += made.propose(one, 4) is not None
        one.tokens.append(3)
        made.measured(step)
    assert cost.rate == pytest.approx(256, rel=1e-3)
    assert drafted == toy.asked, "what is asked for is verified"
    assert toy.asked < 20 if seldom else toy.asked == 40


def test_nothing_is_prepared_for_a_request_whose_drafters_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With much company most of them do: then a step's planning must not grow with the batch for nothing."""
    made, _ = sized([(1, 1.0), (128, 128.0)], Toy(None, seconds=0.05))
    prepared: list[Request] = []
    led = Drafting._led

    def noted(drafting: Drafting, one: Request, budget: int) -> Any:
        prepared.append(one)
        return led(drafting, one, budget)

    monkeypatch.setattr(Drafting, "_led", noted)
    one, asked = request(), made.drafters[0][1]
    for _ in range(20):
        made.propose(one, 4)
        one.tokens.append(5)
    assert 0 < len(prepared) == asked.asked < 20  # type: ignore[attr-defined]


def test_a_request_whose_drafters_are_in_vain_may_run_ahead_and_is_asked_again() -> None:
    made, _ = sized(STEEP, Toy(chain(3, 3)))
    one = request()
    ahead = 0
    for _ in range(200):
        if made.active(one):
            made.propose(one, 4)
        else:
            ahead += 1
        one.tokens.append(5)
    assert 150 < ahead < 200
    made.forget(one)
    assert made.active(one)


# --- drafters that answer for all requests at once


class Batched(Toy):
    """A chain, or with `children` a tree, as deep as it is told; of requests whose names begin with "old" nothing."""

    capabilities = frozenset({"inline", "batched", "drawn", "trees"})

    def __init__(self, depth: int = 6, children: int = 1, seconds: float = 0.0) -> None:
        super().__init__(None, seconds)
        self.depth, self.children = depth, children
        self.levels: list[int] = []
        self.budgets: list[int] = []

    def propose_all(self, contexts: Sequence[Any], budgets: Sequence[int]) -> list[Draft | None]:
        self.asked += 1
        time.sleep(self.seconds * any(not context.request_id.startswith("old") for context in contexts))
        return [self.one(*pair) for pair in zip(contexts, budgets, strict=True)]

    def one(self, context: Any, budget: int) -> Draft | None:
        context.over = context.request_id.startswith("old")
        self.levels.append(context.levels)
        self.budgets.append(budget)
        if context.over:
            return None
        tokens, parents, tip = list[int](), list[int](), -1
        for _ in range(min(self.depth, context.levels)):
            count = min(self.children, budget - len(tokens))
            first = len(tokens)
            if context.draws is not None and count:
                tokens += context.draws.draw(np.ones(rig.VOCAB), tip, count)
            else:
                tokens += range(1, count + 1)
            parents += [tip] * count
            tip = first
        return context.draws.close() if context.draws is not None else Draft(tuple(tokens), tuple(parents))


def test_one_that_has_done_with_a_request_is_asked_no_more_and_does_not_hold_it_up() -> None:
    made, _ = sized(FLAT, toy := Batched())
    old = request()
    old.id = "old/0"
    assert made.active(old)
    assert made.propose(old, 8) is None
    assert not made.active(old)
    assert made.propose(old, 8) is None
    assert toy.asked == 1
    assert made.failures == {}, "it has not failed"


def test_requests_without_an_answer_make_no_draft_look_cheap() -> None:
    """What asking costs is the price of the drafts that came of it."""

    def price(company: int) -> float:
        made, _ = sized(FLAT, Batched(seconds=0.02))
        assert made.sizer is not None
        readers = [request() for _ in range(company)]
        for i, reader in enumerate(readers):
            reader.id = f"old/{i}"
        writer = request()
        for _ in range(3):
            made.propose_all([(one, 8) for one in (writer, *readers)])
            writer.tokens.append(1)
            for reader in readers:
                reader.drafters_off.clear()  # such as one that reads a long prompt
        found = made.sizer._price("toy0").seconds
        made.propose_all([(reader, 8) for reader in readers])
        assert made.sizer._price("toy0").seconds == found
        return found

    assert price(9) > 0.7 * price(0)


@pytest.mark.parametrize("drawn", [False, True])
def test_budgets_have_room_for_the_breadth_of_a_level(drawn: bool) -> None:
    """Where rows are free a draft is as deep with three children a node as with one."""
    made, _ = sized(FLAT, toy := Batched(depth=4, children=3))
    made.chance = Dice(1) if drawn else None
    one = request()
    for _ in range(4):
        draft = made.propose(one, 16)
        one.tokens.append(1)
    assert draft is not None
    assert max(draft.depths()) == 4
    assert len(draft) == 12
    assert toy.levels[-1] >= 4


def test_siblings_that_are_verified_whatever_they_are_are_paid_for() -> None:
    """Three rows a level cost what three rows cost; how many there are the drafter has shown."""
    made, _ = sized([(1, 1.0), (4, 1.3), (8, 8.0), (128, 128.0)], Batched(depth=8, children=3))
    made.chance, one = Dice(1), request()
    assert made.sizer is not None
    assert made.sizer.pays(one, "toy0", 16) > made.sizer.pays(one, "toy0", 16, 3) >= 1
    assert made.sizer.width("toy0") == 1
    made.propose(one, 16)
    assert made.sizer.width("toy0") == 3


def test_siblings_that_are_cut_are_not_paid_for() -> None:
    """A drafter may propose trees to greedy requests and draw chains for others."""
    made, _ = sized(FLAT, Batched(depth=4, children=3))
    assert made.sizer is not None
    assert made.propose(request(), 16) is not None
    assert made.sizer.width("toy0") == 1


# --- drafts


def test_confidence_travels_with_the_nodes() -> None:
    tree = Draft((1, 2, 3), (-1, 0, 0), confidence=(0.9, 0.5, 0.4))
    assert tree.behind([7]).confidence == (1.0, 0.9, 0.5, 0.4)
    assert tree.truncated(2).confidence == (0.9, 0.5)
    assert tree.picked([0, 2]) == Draft((1, 3), (-1, 0), confidence=(0.9, 0.4))
    assert merge([tree, Draft((1,), (-1,), confidence=(0.95,))], 8).confidence == (0.95, 0.5, 0.4)
    assert merge([tree, Draft((1,), (-1,))], 8).confidence is None


@pytest.mark.parametrize("values", [(0.5,), (0.5, 1.5), (0.5, float("nan")), (0.5, -0.1)])
def test_nonsense_confidence_is_refused(values: tuple[float, ...]) -> None:
    assert "confidence" in str(Draft((1, 2), (-1, 0), confidence=values).problem(8, 8))


# --- hangs


def test_a_deadline_passes_on_results_and_errors_and_gives_up_in_time() -> None:
    deadline, gate = Deadline("test", 0.2), threading.Event()
    assert deadline.call(lambda: 5) == 5
    with pytest.raises(KeyError):
        deadline.call(lambda: {}["x"])
    with pytest.raises(TimeoutError, match=r"no answer within 0.2 s"):
        deadline.call(gate.wait)
    assert deadline.call(lambda: 6) == 6
    gate.set()
    assert deadline.call(lambda: 7) == 7  # not the late answer


class Hangs(Toy):
    """Until a gate opens; then it does what it must not."""

    capabilities = frozenset()

    def __init__(self) -> None:
        super().__init__(None)
        self.gate, self.late = threading.Event(), list[BaseException]()

    def propose(self, context: Any, budget: int) -> Draft | None:
        self.asked += 1
        if context.matcher is not None:
            context.matcher.accept(5)
        self.gate.wait()
        try:
            context.matcher.accept(6)
        except RuntimeError as error:
            self.late.append(error)
        return None


def test_a_drafter_that_hangs_is_switched_off_for_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    bad, good = Hangs(), Toy(Draft.chain([5, 3]))
    made = Drafting([("bad", bad), ("good", good)], rig.VOCAB)
    bound = rig.make_request(SamplingParams(regex="abcab"), (1,))
    assert made.propose(bound, 8) == Draft.chain([5, 3])
    assert bound.drafters_off == {"bad"}
    assert made.failures == {"bad": 1}
    bad.gate.set()
    for _ in range(100):
        if bad.late:
            break
        time.sleep(0.01)
    assert "lent for one proposal only" in str(bad.late)
    assert bound.matcher is not None
    assert bound.matcher.forced() == b"abcab"


def test_one_that_hangs_always_is_asked_no_more_by_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.05)
    bad = Hangs()
    made = Drafting([("bad", bad)], rig.VOCAB)
    for _ in range(6):
        one = request()
        assert made.propose(one, 8) is None
        assert one.drafters_off == {"bad"}
    assert bad.asked == 3
    assert made.failures == {"bad": 6}
    bad.gate.set()
