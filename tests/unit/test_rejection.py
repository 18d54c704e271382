"""Rejection sampling: every outcome counted, filters and grammars included; and the classical mistakes, refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import sampling_rig as rig
import torch
from test_verifier import MODEL, PARAMS, allowed_by, plain_probability

from phloem.config import load_config
from phloem.draft_cost import VerifyCost
from phloem.draft_size import Sizer
from phloem.drafting import Drafting
from phloem.drafts import Draft, merge
from phloem.draws import Chance, Dice, Draws, Floats
from phloem.errors import ConfigError
from phloem.interfaces import DraftContext
from phloem.params import SamplingParams
from phloem.sampler import Pending, Sampler
from phloem.verifier import walk_drawn

T = TypeVar("T")


class Scripted:
    """Chance that goes one way of all, and notes how likely that was and which ways it left."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.taken, self.mass = list(script), list[int](), 1.0
        self.ways: list[int] = []

    def pick(self, weights: Floats) -> int:
        alive = np.flatnonzero(weights)
        turn = len(self.taken)
        choice = self.script[turn] if turn < len(self.script) else 0
        self.taken.append(choice)
        self.ways.append(len(alive))
        self.mass *= float(weights[alive[choice]] / np.sum(weights, dtype=np.float64))
        return int(alive[choice])

    def happens(self, probability: float) -> bool:
        sure = min(1.0, probability)
        return self.pick(np.array([1.0 - sure, sure])) == 1


def every(run: Callable[[Chance], T]) -> Iterator[tuple[float, T]]:
    """All that can come of `run`, each with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Scripted(scripts.pop())
        result = run(chance)
        yield chance.mass, result
        for turn in range(len(chance.script), len(chance.taken)):
            scripts += [[*chance.taken[:turn], other] for other in range(1, chance.ways[turn])]


# --- the walk


def walked(
    draft: Draft, samples: Sequence[int], target: Callable[[int], Floats], chance: Chance, *ends: int
) -> tuple[list[int], list[int]]:
    """`walk_drawn`, sent whatever it asks for."""
    likely = [float(target(parent)[token]) for parent, token in zip(draft.parents, draft.tokens, strict=True)]
    going = walk_drawn(draft, samples, likely, chance, frozenset(ends))
    row = None
    while True:
        try:
            row = target(going.send(row))
        except StopIteration as end:
            found: tuple[list[int], list[int]] = end.value
            return found


TARGETS = ([0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], [0.0, 0.9, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0])
PROPOSALS = (*TARGETS, [0.0, 0.0, 0.0, 1.0], [0.05, 0.15, 0.3, 0.5])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_one_token_is_distributed_as_the_target(target: list[float], proposal: list[float], siblings: int) -> None:
    """Children without replacement, as many as there are; whatever they were drawn from."""

    def run(chance: Chance) -> int:
        draws = Draws(chance, 4, siblings)
        draws.draw(np.array(proposal), -1, siblings)
        draft = draws.close()
        assert draft is not None
        tokens, nodes = walked(draft, [0] * (len(draft) + 1), lambda node: np.array(target), chance)
        assert nodes == [] or draft.tokens[nodes[0]] == tokens[0]
        return tokens[0]

    masses = [0.0] * 4
    for mass, token in every(run):
        masses[token] += mass
    assert masses == pytest.approx(target)


def test_more_is_accepted_than_by_the_target_s_own_sample() -> None:
    """The sum of the smaller of both, not of the products: what the option is for."""
    target, proposal = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.25, 0.25, 0.25, 0.25])

    def run(chance: Chance) -> bool:
        draws = Draws(chance, 4, 1)
        draws.draw(proposal)
        draft = draws.close()
        assert draft is not None
        return bool(walked(draft, [0, 0], lambda node: target, chance)[1])

    accepted = sum(mass for mass, hit in every(run) if hit)
    assert accepted == pytest.approx(np.minimum(target, proposal).sum())
    assert accepted > (target * proposal).sum()


def test_top_children_treated_as_draws_would_be_biased() -> None:
    """Design §6's example: the two best of (.5 .3 .15 .05) as if they were draws leave nothing of the others."""
    target = np.array([0.5, 0.3, 0.15, 0.05])
    draft = Draft((0, 1), (-1, -1), drawn=(target, target))
    masses = [0.0] * 4
    for mass, (tokens, _) in every(lambda chance: walked(draft, [0] * 3, lambda node: target, chance)):
        masses[tokens[0]] += mass
    assert masses != pytest.approx(target, abs=0.01)
    assert masses[2:] == pytest.approx([0.0, 0.0])


def test_the_walk_ends_where_the_text_does_and_where_a_row_could_not_be_sampled() -> None:
    sure = [np.eye(4)[token] for token in (1, 2, 3)]
    draft = Draft.chain([1, 2, 3])
    draft = Draft(draft.tokens, draft.parents, drawn=tuple(sure))
    rows = [*sure, np.eye(4)[0]]
    dice = Dice(1)
    assert walked(draft, [9, 9, 9, 0], lambda node: rows[node + 1], dice) == ([1, 2, 3, 0], [0, 1, 2])
    assert walked(draft, [9, 9, 9, 0], lambda node: rows[node + 1], dice, 2) == ([1, 2], [0])
    assert walked(draft, [9, -1, 9, 0], lambda node: rows[node + 1], dice) == ([1], [0])


# --- through drafting and the sampler, with all filters


class Drawing:
    """Draws from tables of its own: chains, or trees of several children."""

    capabilities = frozenset({"drawn", "inline"})

    def __init__(self, *, depth: int = 2, children: int = 1, seed: int = 5) -> None:
        self.model, self.depth, self.children = rig.toy_model(seed), depth, children

    def probabilities(self, tokens: Sequence[int]) -> Floats:
        made: Floats = np.exp(np.array(self.model(tokens)))
        return made

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        if context.draws is None:
            return Draft.chain([int(np.argmax(self.probabilities(context.tokens)))])
        tokens, parent = context.tokens.tolist(), -1
        for _ in range(min(self.depth, budget // self.children)):
            first = len(context.draws)
            drawn = context.draws.draw(self.probabilities(tokens), parent, self.children)
            tokens, parent = [*tokens, drawn[0]], first
        return context.draws.close()

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def drafting(drafter: Any, chance: Chance) -> Drafting:
    made = Drafting([("drawing", drafter)], rig.VOCAB)
    made.chance = chance
    return made


CASES = [("plain", 2, 1), ("all cuts", 2, 1), ("penalties", 2, 1), ("min_tokens", 2, 1), ("grammar and more", 1, 2)]
CASES += [("top_p", 1, 2), ("bias", 1, 1), ("grammar", 2, 1)]


@pytest.mark.parametrize(("name", "depth", "children"), CASES)
def test_every_outcome_of_a_step(name: str, depth: int, children: int) -> None:
    """what-breaks 41: masses of first tokens are the target's; those of second ones are, of each accepted first one."""

    def run(chance: Chance) -> tuple[tuple[int, ...], int]:
        request = rig.make_request(PARAMS[name], (4, 5))
        draft = drafting(Drawing(depth=depth, children=children), chance).propose(request, 4)
        assert draft is not None
        assert draft.drawn is not None
        sampler = Sampler(rig.VOCAB, {}, chance)
        (outcome,) = rig.run_step(MODEL, sampler, [rig.segment_of(request, draft)])
        assert outcome.error is None
        return tuple(outcome.tokens[:depth]), len(outcome.nodes)

    firsts: defaultdict[int, float] = defaultdict(float)
    seconds: defaultdict[tuple[int, ...], float] = defaultdict(float)
    gone_on: defaultdict[int, float] = defaultdict(float)
    for mass, (tokens, _) in every(run):
        firsts[tokens[0]] += mass
        if len(tokens) == 2:
            seconds[tokens] += mass
            gone_on[tokens[0]] += mass
    assert sum(firsts.values()) == pytest.approx(1.0)
    for token in range(rig.VOCAB):
        assert firsts[token] == pytest.approx(plain_probability(name, (token,)), abs=1e-6)
    for pair, mass in seconds.items():
        rest = plain_probability(name, pair) / plain_probability(name, pair[:1])
        assert mass == pytest.approx(gone_on[pair[0]] * rest, abs=1e-6), pair


@pytest.mark.parametrize(("children", "most"), [(1, 1), (2, 3)])
def test_the_device_is_asked_for_all_requests_at_once(
    monkeypatch: pytest.MonkeyPatch, children: int, most: int
) -> None:
    """For whole rows only where a node's first child is refused; of trees, once a level at most."""
    asked: list[int] = []
    whole = Pending._probabilities

    def counted(pending: Pending, places: Any) -> list[Floats]:
        asked.extend([len(places)] if places else [])
        return whole(pending, places)

    monkeypatch.setattr(Pending, "_probabilities", counted)
    requests = [rig.make_request(PARAMS["all cuts" if i % 2 else "plain"], (4, i), seed=i) for i in range(12)]
    made = drafting(Drawing(depth=3, children=children), Dice(3))
    segments = [rig.segment_of(request, made.propose(request, 6)) for request in requests]
    outcomes = rig.run_step(MODEL, Sampler(rig.VOCAB, {}, Dice(4)), segments)
    accepted = sum(len(outcome.nodes) for outcome in outcomes)
    assert 0 < accepted < sum(len(segment.draft or ()) for segment in segments)
    assert 0 < len(asked) <= most
    assert sum(asked) <= len(requests) * most


@pytest.mark.parametrize(
    "name", ["plain", "hot", "top_k", "top_p", "min_p", "all cuts", "penalties", "min_tokens", "bias"]
)
def test_a_token_s_chance_is_that_in_its_whole_row(name: str) -> None:
    requests = [rig.make_request(PARAMS[each], (4, i), seed=i) for i, each in enumerate((name, "top_p", "plain"))]
    draft = Draft((1, 2, 3, 4, 1), (-1, 0, 1, 0, 3))
    segments = [rig.segment_of(request, draft) for request in requests]
    logits = torch.tensor([MODEL([i, 2 * i + 1]) for i in range(18)])
    work = Sampler(rig.VOCAB, {}).start(rig.head_of(logits), segments).work
    assert work is not None
    rows = [*range(len(work.scores)), 3, 3]
    chances = work.dense(rows).double().softmax(-1)
    for token in range(rig.VOCAB):
        assert work.chances(rows, [token] * len(rows)) == pytest.approx(chances[:, token].tolist(), abs=1e-6)


def test_the_grammar_cuts_nothing_that_was_drawn() -> None:
    """Or else tokens that it refuses would leave their share to all others in the wrong proportion."""
    request = rig.make_request(SamplingParams(regex="(a|b)(c|d)"), (4, 5))
    assert allowed_by(request) == {1, 2, 6}

    class Blind(Drawing):
        def probabilities(self, tokens: Sequence[int]) -> Floats:
            return np.eye(rig.VOCAB)[3]

    draft = drafting(Blind(), Dice(1)).propose(request, 4)
    assert draft is not None
    assert draft.tokens == (3, 3)
    assert draft.drawn is not None


@pytest.mark.parametrize(
    ("params", "draws"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.0), False),
        (SamplingParams(seed=3), False),
    ],
)
def test_seeds_and_greedy_requests_are_verified_as_ever(params: SamplingParams, draws: bool) -> None:
    draft = drafting(Drawing(), Dice(1)).propose(rig.make_request(params), 4)
    assert draft is not None
    assert (draft.drawn is not None) is draws


def test_without_the_option_nothing_is_drawn() -> None:
    made = Drafting([("drawing", Drawing())], rig.VOCAB)
    draft = made.propose(rig.make_request(), 4)
    assert draft is not None
    assert draft.drawn is None


def test_behind_a_leader_nothing_is_drawn() -> None:
    class Leader(Drawing):
        capabilities = frozenset({"leads", "inline"})

        def propose(self, context: DraftContext, budget: int) -> Draft | None:
            return Draft.chain([3])

    made = Drafting([("leader", Leader()), ("drawing", Drawing())], rig.VOCAB)
    made.chance = Dice(1)
    draft = made.propose(rig.make_request(), 4)
    assert draft is not None
    assert len(draft) == 2
    assert draft.drawn is None


def test_how_deep_it_goes_is_settled_before_anything_is_drawn() -> None:
    """By what rows cost and what was accepted before: what is drawn has no say in it, and nothing of it is cut."""
    made = drafting(Drawing(depth=4), Dice(1))
    made.sizer = Sizer(VerifyCost([(1, 1.0), (128, 1.01)]))
    free = made.propose(rig.make_request(), 4)
    assert free is not None
    assert free.drawn is not None
    assert len(free) == 4
    made.sizer = Sizer(VerifyCost([(1, 1.0), (128, 128.0)]))
    drafter = made.drafters[0][1]
    asked: list[tuple[bool, int]] = []
    propose = drafter.propose

    def noted(context: DraftContext, budget: int) -> Draft | None:
        asked.append((context.draws is not None, budget))
        return propose(context, budget)

    drafter.propose = noted  # type: ignore[method-assign]
    assert made.propose(rig.make_request(), 4) is None
    assert asked == [(False, 2)]  # to learn whether it would pay: what is not verified need not be drawn


# --- the classical mistakes


class TopK(Drawing):
    """Its best children, as if they were draws."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        best = np.argsort(-self.probabilities(context.tokens))[:2].tolist()
        return Draft(tuple(best), (-1, -1))


class Claims(TopK):
    """The same, with the probabilities they were not drawn from."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        q = self.probabilities(context.tokens)
        return Draft(tuple(np.argsort(-q)[:2].tolist()), (-1, -1), drawn=(q, q))


class Prunes(Drawing):
    """Draws a chain, and leaves out the end of which it is not sure."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        draft = super().propose(context, budget)
        return draft and draft.truncated(1)


class Ranks(Drawing):
    """Draws two children, and proposes the likelier one first."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        assert context.draws is not None
        two = context.draws.draw(self.probabilities(context.tokens), -1, 2)
        return Draft(tuple(two[::-1]), (-1, -1))


class Merges(Drawing):
    """Puts a guess beside what was drawn."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        draft = super().propose(context, budget)
        assert draft is not None
        return merge([draft, Draft.chain([(draft.tokens[0] + 1) % rig.VOCAB])], 4)


class Twice(Drawing):
    """Draws again until it likes what comes."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        assert context.draws is not None
        for _ in range(2):
            context.draws.draw(self.probabilities(context.tokens))
        return None


@pytest.mark.parametrize(
    ("mistake", "nodes", "words"),
    [
        (TopK, 0, "its 2 nodes were not drawn"),
        (Claims, 0, "its 2 nodes were not drawn"),
        (Prunes, 2, "it drew 2 nodes and proposes 1, not the same: what is drawn is never chosen from"),
        (Ranks, 2, "it drew 2 nodes and proposes 2, not the same"),
        (Merges, 2, "it drew 2 nodes and proposes 3, not the same"),
        (Twice, 1, "node -1 has its children: they are drawn in one call, without replacement"),
    ],
)
def test_the_classical_mistakes_are_refused(
    mistake: type[Drawing], nodes: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The drafter is switched off; what it drew is verified all the same, as leaving it out would be one more."""
    request = rig.make_request()
    made = drafting(mistake(), Dice(1))
    draft = made.propose(request, 4)
    assert len(draft or ()) == nodes
    assert draft is None or draft.drawn is not None
    assert words in caplog.text
    assert request.drafters_off == {"drawing"}
    assert made.failures == {"drawing": 1}
    assert made.propose(request, 4) is None


def test_claims_without_being_asked_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    made = Drafting([("drawing", Claims())], rig.VOCAB)
    assert made.propose(rig.make_request(), 4) is None
    assert "only what `context.draws` has drawn is taken for drawn" in caplog.text


@pytest.mark.parametrize("picked", [[0], [1, 0], [0, 2]])
def test_what_is_picked_from_a_draft_was_not_drawn(picked: list[int]) -> None:
    q = np.full(4, 0.25)
    draft = Draft((1, 2, 3), (-1, -1, -1), drawn=(q, q, q))
    assert draft.picked(picked).drawn is None
    kept = draft.truncated(2)  # by a number that knew nothing of the draws
    assert kept.drawn is not None
    assert len(kept.drawn) == 2
    assert merge([draft, Draft.chain([0])], 9).drawn is None
    assert draft.chained().drawn == (q,)
    assert draft.chained().tokens == (1,)  # the first one, whatever came of the others


@pytest.mark.parametrize(
    ("probabilities", "parent", "count", "words"),
    [
        ([0.5, 0.5], -1, 1, "shape (2,), the vocabulary has 4"),
        ([0.5, -0.5, 1, 0], -1, 1, "none negative"),
        ([0, 0, 0, 0], -1, 1, "not all 0"),
        ([np.nan, 1, 1, 1], -1, 1, "finite"),
        ([1, 1, 1, 1], 0, 1, "node 0 is not drawn yet"),
        ([1, 1, 1, 1], -1, 3, "3 more nodes, but 2 are left of the budget"),
    ],
)
def test_draws_that_make_no_sense(probabilities: list[float], parent: int, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        Draws(Dice(1), 4, 2).draw(np.array(probabilities), parent, count)


def test_dice_fall_as_they_are_weighted() -> None:
    dice, counts = Dice(3), np.zeros(4)
    for _ in range(4000):
        counts[dice.pick(np.array([0.0, 2.0, 1.0, 1.0]))] += 1
    assert counts[0] == 0
    assert counts[1:] / 4000 == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert sum(dice.happens(0.3) for _ in range(4000)) / 4000 == pytest.approx(0.3, abs=0.03)


# --- the option


FILE = """from pydantic import BaseModel, ConfigDict


class Drawing:
    api = 1
    capabilities = frozenset({"drawn"})

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options, context):
        pass

    def propose(self, context, budget):
        return None

    def forget(self, request_id):
        pass
"""


@pytest.mark.parametrize(
    ("spec", "engine", "words"),
    [
        ([], {}, "is for one drafter: what several propose is merged, and no draw any more (spec has none)"),
        (["grammar"], {}, "(spec has none)"),
        (["ngram"], {}, "'ngram' chooses (it does not declare `drawn`)"),
        (["DRAWING", "suffix"], {}, ":Drawing, suffix)"),
        (["DRAWING"], {"seed": 4}, "repeats no output, which engine.seed asks for"),
    ],
)
def test_what_the_option_refuses(tmp_path: Path, spec: list[str], engine: dict[str, Any], words: str) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(FILE)
    uses = [{"use": f"{file}:Drawing" if use == "DRAWING" else use} for use in spec]
    with pytest.raises(ConfigError) as caught:
        load_config(sections={"spec": uses, "engine": {"verify": "rejection", **engine}}, env={})
    assert words in str(caught.value)
    assert "engine.verify: rejection" in str(caught.value)


def test_a_leader_may_stand_beside(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(FILE)
    uses = [{"use": "grammar"}, {"use": f"{tmp_path / 'drawing.py'}:Drawing"}]
    assert load_config(sections={"spec": uses, "engine": {"verify": "rejection"}}, env={}).engine.verify == "rejection"
