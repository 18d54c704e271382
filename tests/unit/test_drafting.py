"""Several drafters behind one `propose`: who continues whom, what the grammar cuts, and whom a failure hurts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sampling_rig as rig

from phloem.drafting import CANONICAL, Drafting
from phloem.drafts import Draft
from phloem.errors import StepError
from phloem.interfaces import DraftContext
from phloem.params import SamplingParams
from phloem.request import Request

Proposal = Callable[[DraftContext], Draft | None]
A, B, C, D, AB, BC, E = range(1, 8)  # sampling_rig.TEXTS


class Toy:
    """Does what it is told, and keeps what it was shown."""

    def __init__(self, *capabilities: str, propose: Proposal | Draft | None = None) -> None:
        self.capabilities = frozenset(capabilities)
        self.does = propose
        self.seen: list[list[int]] = []

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        self.seen.append(context.tokens.tolist())
        return self.does(context) if callable(self.does) else self.does

    def forget(self, request_id: str) -> None:
        """Nothing is kept of it."""


def drafting(*drafters: Toy) -> Drafting:
    return Drafting([(f"toy{i}", drafter) for i, drafter in enumerate(drafters)], rig.VOCAB)


def request(pattern: str | None = "abc(d|e)abc", *output: int) -> Request:
    made = rig.make_request(SamplingParams(regex=pattern), (1,))
    for token in output:
        made.tokens.append(token)
        assert made.matcher is None or made.matcher.accept(token)
    return made


def forced(made: Request) -> bytes:
    """Where its matcher stands."""
    assert made.matcher is not None
    return made.matcher.forced()


# --- who continues whom


@pytest.mark.parametrize("pattern", ["abc(d|e)abc", None])
def test_others_continue_a_leader_s_chain(pattern: str | None) -> None:
    stood = []

    def look(context: DraftContext) -> Draft:
        stood.append(context.matcher and context.matcher.forced())
        return Draft((D, E, AB), (-1, -1, 1))

    leader, follower = Toy("leads", propose=Draft.chain([AB, C])), Toy(propose=look)
    made = request(pattern)
    draft = drafting(follower, leader).propose(made, 8)
    assert draft == Draft((AB, C, D, E, AB), (-1, 0, 1, 1, 3))
    assert leader.seen == [[1]]
    assert follower.seen == [[1, AB, C]]
    assert made.tokens.tolist() == [1]
    if pattern:
        assert stood == [b""]  # after `abc` two letters may follow
        assert forced(made) == b"abc"


def test_others_propose_at_the_text_s_end_where_the_leader_has_nothing() -> None:
    follower = Toy(propose=Draft.chain([A, B]))
    assert drafting(Toy("leads"), follower).propose(request(), 8) == Draft.chain([A, B])
    assert follower.seen == [[1]]


def test_a_leader_s_tree_has_no_end_to_continue() -> None:
    leader, follower = Toy("leads", propose=Draft((A, AB), (-1, -1))), Toy(propose=Draft.chain([A, BC]))
    assert drafting(leader, follower).propose(request(), 8) == Draft((A, AB, BC), (-1, -1, 0))
    assert follower.seen == [[1]]


def test_the_leader_has_first_claim_on_the_budget() -> None:
    follower = Toy(propose=lambda context: Draft.chain([D]))
    assert drafting(Toy("leads", propose=Draft.chain([AB, C])), follower).propose(request(), 2) == Draft.chain([AB, C])
    assert not follower.seen
    draft = drafting(Toy("leads", propose=Draft.chain([AB, C])), follower).propose(request(), 3)
    assert draft == Draft.chain([AB, C, D])


def test_where_the_model_takes_no_trees_the_likeliest_path_is_run() -> None:
    made = drafting(Toy(propose=Draft((A, B, C, D), (-1, -1, 1, 1), confidence=(0.4, 0.6, 0.1, 0.2))))
    made.branches = False
    assert made.propose(request(None), 8) == Draft((B, D), (-1, 0), confidence=(0.6, 0.2))
    made = drafting(Toy(propose=Draft((A, B, C, D), (-1, -1, 0, 1))))
    made.branches = False
    assert made.propose(request(None), 8) == Draft.chain([A, C])


# --- what the grammar cuts


def test_nodes_that_the_grammar_refuses_fall_with_what_follows_them() -> None:
    tree = Draft((B, A, A, BC, D, E, B), (-1, -1, 0, 1, 3, 3, 1))
    made = request()
    assert drafting(Toy(propose=tree)).propose(made, 8) == Draft((A, BC, D, E, B), (-1, 0, 1, 1, 0))
    assert forced(made) == b"abc"


def test_a_branch_is_left_and_come_back_to() -> None:
    """Breadth first: the paths to D and to C are walked in turn."""
    tree = Draft((AB, A, C, B, D, C, E), (-1, -1, 0, 1, 2, 3, 5))
    assert drafting(Toy(propose=tree)).propose(request(), 8) == tree


def test_nothing_is_left() -> None:
    assert drafting(Toy(propose=Draft.chain([B, B]))).propose(request(), 8) is None


def test_stop_tokens_are_no_drafts() -> None:
    made = request("ab(cd)?", AB)
    assert drafting(Toy(propose=Draft.chain([rig.END]))).propose(made, 8) is None
    made.stop_ids |= {D}
    assert drafting(Toy(propose=Draft.chain([C, D]))).propose(made, 8) == Draft.chain([C])


# --- whom a failure hurts


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda context: context.matcher.accept(AB) and 1 / 0, "ZeroDivisionError"),
        (lambda context: context.matcher.rollback(1), "1 tokens to take back, but only 0 were accepted"),
        (lambda context: context.matcher.accept(AB) and Draft((1, 2), (-1, 5)), "parent 5 of node 1"),
        (lambda context: Draft((A, AB), (-1, -1), forced=2), "the first 2 nodes are forced, but no chain"),
    ],
)
def test_a_drafter_that_fails_is_switched_off_and_leaves_no_trace(
    does: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = request("abcab(c|d)", AB, C)
    bad, good = Toy(propose=does), Toy(propose=Draft.chain([AB]))
    both = drafting(bad, good)
    assert both.propose(made, 8) == Draft.chain([AB])
    assert made.drafters_off == {"toy0"}
    assert words in caplog.text
    assert forced(made) == b"ab"
    assert made.error is None
    assert both.propose(made, 8) == Draft.chain([AB])
    assert len(bad.seen) == 1


def test_what_a_drafter_leaves_accepted_is_taken_back() -> None:
    def careless(context: DraftContext) -> Draft:
        assert context.matcher is not None
        assert context.matcher.accept(AB)
        return Draft.chain([AB, C])

    made = request()
    assert drafting(Toy("leads", propose=careless), Toy(propose=careless)).propose(made, 8) == Draft.chain([AB, C])
    assert made.drafters_off == {"toy1"}  # behind `abc` no `ab` follows: its assertion failed, and only it
    assert forced(made) == b"abc"


def test_a_matcher_that_fails_fails_its_request_only() -> None:
    made, other = request(), request()

    class Broken:
        def __init__(self, matcher: Any) -> None:
            self.fill, self.forced, self.rollback = matcher.fill, matcher.forced, matcher.rollback
            self.is_complete, self.fork = matcher.is_complete, matcher.fork

        def accept(self, token: int) -> bool:
            raise LookupError("lost its table")

    made.matcher = Broken(made.matcher)
    both = drafting(Toy(propose=Draft.chain([AB])))
    assert both.propose(made, 8) is None
    assert isinstance(made.error, StepError)
    assert "the grammar of call0/0 failed: LookupError('lost its table')" in str(made.error)
    assert not made.drafters_off
    assert both.propose(other, 8) == Draft.chain([AB])
    assert other.error is None


# --- forced tokens, and who is asked at all


def test_forced_tokens_are_noted_once_and_end_where_the_grammar_cuts() -> None:
    lossy = Toy("leads", propose=Draft((AB, C, AB), (-1, 0, 1), forced=3))
    follower = Toy(propose=lambda context: Draft.chain([D]))
    made = request()
    draft = drafting(lossy, follower).propose(made, 8)
    assert draft == Draft((AB, C, D), (-1, 0, 1), forced=2)
    drafting(lossy).propose(made, 1)
    assert made.notes == [CANONICAL]
    assert Draft((AB, C, AB), (-1, 0, 1), forced=3).truncated(1).forced == 1


def test_who_proposes_under_grammars_only_keeps_no_other_request_waiting() -> None:
    drafter = Toy("constrained", propose=Draft.chain([AB]))
    alone = drafting(drafter)
    assert alone.active(request())
    assert not alone.active(request(None))
    assert alone.propose(request(None), 8) is None
    assert not drafter.seen
    assert drafting(drafter, Toy()).active(request(None))
    off = request()
    off.drafters_off.add("toy0")
    assert not alone.active(off)


@pytest.mark.parametrize(("unit", "tree"), [(1, False), (4, False), (5, True), (8, True)])
def test_a_tree_across_a_cut_of_the_kernel_is_run_as_a_chain(unit: int, tree: bool) -> None:
    """Behind two tokens: three nodes lie at 2 to 4 of the context."""
    joint = drafting(Toy(propose=Draft((A, B, C), (-1, -1, 0))))
    joint.tree_unit = unit
    proposed = joint.propose(request(None, 5), 8)
    assert proposed is not None
    assert proposed.parents == ((-1, -1, 0) if tree else (-1, 0))
    assert proposed.tokens == ((A, B, C) if tree else (A, C))
