"""Asks the drafters and keeps the engine safe from them: a bad one is switched off for the request, never trusted."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from .batch import IntArray, StepStats
from .deadline import Deadline
from .draft_size import Sizer
from .drafts import Draft, merge
from .draws import Chance, Draws
from .errors import StepError
from .features import Seen, SeesStates, at
from .interfaces import BatchedDrafter, DraftContext, Drafter, HoldsKV, KeepsRows, Matcher
from .request import Namespace, Request

CANONICAL = "forced text was accepted without asking the model (forcing: canonical)"
LIMIT_S = 1.0  # a drafter that takes longer hangs
_HANGS = 3  # after so many a drafter is asked no more: each has left a thread behind
_UNCUT = 1 << 20

log = logging.getLogger(__name__)
T = TypeVar("T")
Named = tuple[str, Drafter]
Want = tuple[Request, int]  # whom to propose for, and the most nodes


@dataclass(slots=True, eq=False)
class _Place:
    """One request of a step: where its drafters stand, and what they have proposed."""

    request: Request
    budget: int
    context: DraftContext
    matcher: Borrowed | None = None  # stands at the end of the lead
    lead: Draft | None = None
    chain: tuple[int, ...] = ()  # the lead, where others continue it
    room: int = 0  # left of the budget for who follows
    drafts: list[Draft] = field(default_factory=list)  # of those
    rest: Draft | None = None  # what of them is verified
    asked: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Question:
    """What one drafter is asked for one request."""

    place: _Place
    context: DraftContext
    budget: int

    @classmethod
    def of(cls, place: _Place, budget: int, draws: Draws | None = None, levels: int = _UNCUT) -> _Question:
        """With a matcher that is lent for this question only."""
        lender = place.context.matcher
        matcher = Borrowed(lender) if lender is not None else None
        return cls(place, replace(place.context, matcher=matcher, draws=draws, levels=levels), budget)

    def take_back(self) -> None:
        """What was lent."""
        if isinstance(self.context.matcher, Borrowed):
            self.context.matcher.close()

    def problem(self, draft: Draft | None, vocab_size: int) -> str | None:
        """Why an answer cannot be used, or None."""
        if self.context.draws is not None and (problem := self.context.draws.problem(draft)):
            return problem
        if draft is not None and draft.drawn is not None and self.context.draws is None:
            return "it says what its nodes were drawn from: only what `context.draws` has drawn is taken for drawn"
        return None if draft is None else draft.problem(vocab_size, self.budget)


class Drafting:
    """All drafters of an engine, in the order of `spec:`, behind one `propose_all`. Earlier ones have first claim.

    With a `sizer` those that follow are given as many nodes as pay, the likeliest first, whoever proposed them. With a
    `chance` the drafts of a drafter that can draw are for rejection sampling, where the request allows it.
    """

    def __init__(self, drafters: Sequence[Named], vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self._leaders = [pair for pair in self.drafters if "leads" in _capabilities(pair[1])]
        self._followers = [pair for pair in self.drafters if pair not in self._leaders]
        self._watchers = [pair for pair in self.drafters if "features" in _capabilities(pair[1])]
        self.lodgers = [(name, cast(KeepsRows, each)) for name, each in self.drafters if "rows" in _capabilities(each)]
        layers = {layer for _, drafter in self._watchers for layer in cast(SeesStates, drafter).layers}
        layers |= {layer for _, drafter in self.lodgers for layer in drafter.layers}
        self.layers = tuple(sorted(layers))  # whose hidden states they read
        self.slots_of: Callable[[Request], IntArray] | None = None  # where the rows of lodgers lie
        self.vocab_size = vocab_size
        self.sizer: Sizer | None = None
        self.chance: Chance | None = None
        self.branches = True  # the model and its kernel take trees; else the likeliest path of each is run
        self.tree_unit = _UNCUT  # at whose multiples in a context no tree may be cut, see `Attention`
        self.failures: Counter[str] = Counter()
        self.hangs: Counter[str] = Counter()
        self.lost: Mapping[str, str] = {}  # lodgers whose rows are incomplete, and why
        self._threads = {
            name: Deadline(name, LIMIT_S) for name, drafter in self.drafters if "inline" not in _capabilities(drafter)
        }

    @property
    def keepers(self) -> list[tuple[str, HoldsKV]]:
        """Those with K and V of their own."""
        return [(name, cast(HoldsKV, each)) for name, each in self.drafters if "kv" in _capabilities(each)]

    @property
    def watched(self) -> bool:
        """Whether anybody is to be told what a step has verified."""
        return bool(self._watchers)

    @property
    def sizable(self) -> bool:
        """Whether any drafter proposes what may turn out wrong, so that a sizer is of use."""
        return bool(self._followers)

    def active(self, request: Request) -> bool:
        """True if any drafter is expected to propose for the request now. Some do under a grammar only."""
        if self.sizer is not None and request.matcher is None and self.sizer.rests(request):
            return False
        return self._able(request)

    def _able(self, request: Request) -> bool:
        return any(_may(request, *each) for each in self.drafters)

    def _resting(self, request: Request) -> bool:
        """Nobody can propose for the request, or who can is left out this time: nothing need be prepared for them."""
        if any(_may(request, *each) for each in self._leaders):
            return False
        able = [name for name, each in self._followers if _may(request, name, each)]
        return not able or (self.sizer is not None and all(self.sizer.skips(request, name) for name in able))

    def propose(self, request: Request, budget: int) -> Draft | None:
        """For one request."""
        return self.propose_all([(request, budget)])[0]

    def propose_all(self, wants: Sequence[Want]) -> list[Draft | None]:
        """For each request one tree of at most so many nodes from all drafters, or None. Called once a step."""
        places = [
            None if self._resting(request) else _guarded(request, partial(self._led, request, budget))
            for request, budget in wants
        ]
        for name, drafter in self._followers:
            self._follow(name, drafter, [place for place in places if place is not None and place.room > 0])
        self._cut([place for place in places if place is not None])
        return [
            _guarded(place.request, partial(self._joined, place)) if place is not None else None for place in places
        ]

    def _led(self, request: Request, budget: int) -> _Place:
        """Ask who leads, and go to the end of their chain, if it is one."""
        space = request.namespace
        if request.keys is not request.tokens:  # a key scheme may keep apart what has one namespace
            space = Namespace(space.salt, f"{request.id}#{request.arrival}")  # ids come from clients, and come again
        parameters = (request.id, request.tokens, request.prompt_len, space, request.matcher)
        slots = self.slots_of(request) if self.slots_of is not None else None
        place = _Place(request, budget, DraftContext(*parameters, request.params, slots=slots))
        leads = []
        for name, drafter in self._leaders:
            if _may(request, name, drafter):
                leads += [one for _, one in self._asked(name, drafter, [_Question.of(place, budget)]) if one]
        place.lead = lead = merge(leads, budget) or None
        if not self._followers:
            return place
        place.room = budget - len(lead or ())
        place.chain = lead.tokens if lead is not None and lead.is_chain and place.room > 0 else ()
        place.matcher = Borrowed(request.matcher) if request.matcher is not None else None
        tokens = request.tokens + array("i", place.chain) if place.chain else request.tokens  # no copy for nothing
        place.context = replace(place.context, tokens=tokens, matcher=place.matcher, chain=len(place.chain))
        if place.matcher is not None and not all(map(place.matcher.accept, place.chain)):
            raise ValueError("it refuses what it has accepted")
        return place

    def _follow(self, name: str, drafter: Drafter, places: Sequence[_Place]) -> None:
        """Ask one drafter about all requests of a step, at once if it can, and keep what it proposes."""
        sizer, batched = self.sizer, "batched" in _capabilities(drafter)
        questions = self._questions(name, drafter, places)
        for group in [questions] if batched else [[one] for one in questions]:
            begin = time.perf_counter()
            answers = self._asked(name, drafter, group) if group else []
            if sizer is not None and group:
                drafts = [draft for _, draft in answers if draft]
                # who reads a prompt, for some steps, is no draft and tells no price of one
                sizer.took(name, time.perf_counter() - begin, len(drafts) if batched else 1, drafts)
            for question, draft in answers:
                place = question.place
                if question.context.over:
                    place.request.drafters_off.add(name)
                if draft or not batched:  # one that reads has nothing yet, and need not rest from it
                    place.asked.append(name)
                if draft and sizer is not None:
                    draft = sizer.judged(place.request, name, draft, place.chain)
                place.drafts += [draft] if draft else []

    def _questions(self, name: str, drafter: Drafter, places: Sequence[_Place]) -> list[_Question]:
        """Whom to ask a drafter about, and for how much."""
        sizer, able = self.sizer, _capabilities(drafter)
        limited = sizer is not None and ("batched" in able or "drawn" in able)  # cutting later would be late, or wrong
        questions = []
        for place in places:
            request, room = place.request, place.room
            if request.error is not None or not _may(request, name, drafter):
                continue
            if sizer is not None and sizer.skips(request, name):
                continue
            chance, draws = self._chance(drafter, place), None
            width = sizer.width(name) if sizer is not None and chance is not None else 1
            paid = sizer.pays(request, name, room, width) if sizer is not None and limited else room
            if chance is not None and paid:
                draws = Draws(chance, self.vocab_size, min(room, paid * width))  # all of it is verified, siblings too
            levels = paid or min(room, 2)  # what pays nothing is asked for a little, to learn whether it would
            budget = min(room, paid * width) if draws is not None else room if "trees" in able else levels
            questions.append(_Question.of(place, budget, draws, levels))
        return questions

    def _chance(self, drafter: Drafter, place: _Place) -> Chance | None:
        """By what to draw, if the draft is for rejection sampling. Depends on the text alone, as it must."""
        params = place.request.params
        able = "drawn" in _capabilities(drafter) and params.seed is None and not params.greedy and place.lead is None
        return self.chance if able else None

    def _cut(self, places: Sequence[_Place]) -> None:
        """Keep of what followed what pays: of each request's, and of the step's as a whole."""
        for place in places:
            place.rest = merge(place.drafts, _UNCUT if self.sizer is not None else place.room) or None
            if self.sizer is not None and place.asked and place.request.error is None:
                place.rest = self.sizer.cut(place.request, place.asked, place.rest, place.room)
        drawn = [place for place in places if place.rest is not None and place.rest.drawn is not None]
        if self.sizer is not None and not self.sizer.settle(paid=bool(drawn) or any(place.lead for place in places)):
            for place in places:
                place.rest = None

    def _joined(self, place: _Place) -> Draft | None:
        """One tree of the leaders' and the others' proposals."""
        request, chain, budget, lead, rest = place.request, place.chain, place.budget, place.lead, place.rest
        if request.error is not None:
            return None
        if place.matcher is not None:
            place.matcher.restore()
        if rest and chain:
            rest = rest.behind(chain)
        draft = merge([one for one in (lead, rest) if one], budget) or None
        if draft is not None and not self._branching(len(request.tokens), draft):
            draft = draft.chained()
        if draft is not None and draft.forced and CANONICAL not in request.notes:
            request.notes.append(CANONICAL)
        return draft

    def _branching(self, begin: int, draft: Draft) -> bool:
        """Whether a draft behind so many tokens may be a tree. What was drawn is right whatever the last bits are."""
        return self.branches and (draft.drawn is not None or begin % self.tree_unit + len(draft) <= self.tree_unit)

    def _asked(self, name: str, drafter: Drafter, questions: list[_Question]) -> list[tuple[_Question, Draft | None]]:
        """The answers that can be used, without what the grammar refuses and what could not be written.

        What was drawn stays whole: where such a node goes, rejection sampling goes wrong.
        """
        problem, drafts = self._call(name, drafter, questions)
        answers: list[tuple[_Question, Draft | None]] = []
        for question, draft in zip(questions, drafts, strict=True):
            request, draws = question.place.request, question.context.draws
            _guarded(request, question.take_back)
            try:
                reason = problem or question.problem(draft, self.vocab_size)
            except Exception as error:  # it is no draft at all
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                self._switch_off(name, request, reason)
            if draws is not None:
                draft = draws.close()
            elif reason is not None:
                draft = None
            elif draft is not None:
                draft = _guarded(request, partial(_allowed, draft, question.place.context.matcher, request.stop_ids))
            answers.append((question, draft))
        return answers

    def _call(
        self, name: str, drafter: Drafter, questions: Sequence[_Question]
    ) -> tuple[str | None, Sequence[Draft | None]]:
        """Why there is no answer, or None; and the answers."""
        nothing = [None] * len(questions)
        if self.hangs[name] >= _HANGS:
            return "it has hung too often", nothing
        if name in self.lost:
            return self.lost[name], nothing
        thread = self._threads.get(name)
        try:
            ask = partial(_ask, drafter, questions)
            drafts: Sequence[Draft | None] = ask() if thread is None else thread.call(ask)
        except TimeoutError as error:
            self.hangs[name] += 1
            return str(error), nothing
        except Exception as error:  # a stranger's code: its failure must not be the request's
            return f"{type(error).__name__}: {error}", nothing
        if len(drafts) != len(questions):
            return f"{len(drafts)} answers to {len(questions)} questions", nothing
        return None, drafts

    def _switch_off(self, name: str, request: Request, problem: str) -> None:
        self.failures[name] += 1
        request.drafters_off.add(name)
        log.warning("drafter %s is switched off for request %s: %s", name, request.id, problem)

    def saw(self, seen: Sequence[Seen]) -> None:
        """A step has verified tokens, and these are their hidden states, at `layers`. Called once a step."""
        for name, drafter in self._watchers if seen else ():
            watcher = cast(SeesStates, drafter)
            own = [one for one in seen if name not in one.request.drafters_off]
            told = [one._replace(states=at(watcher.layers, self.layers, one.states)) for one in own]
            try:
                if told:
                    watcher.observe(told)
            except Exception as error:
                for one in own:
                    self._switch_off(name, one.request, f"{type(error).__name__}: {error}")

    def measured(self, stats: StepStats) -> None:
        """A step has been committed. Called once a step."""
        if self.sizer is not None:
            self.sizer.measured(stats)

    def idled(self) -> None:
        """The loop has waited for something to do: that is no time of the next step."""
        if self.sizer is not None:
            self.sizer.cost.idled()

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self.sizer is not None:
            self.sizer.forget(request)
        for name, drafter in self.drafters:
            try:
                drafter.forget(request.id)
            except Exception as error:
                self.failures[name] += 1
                log.warning("drafter %s failed to forget request %s: %s", name, request.id, error)


def _capabilities(drafter: Drafter) -> frozenset[str]:
    return getattr(drafter, "capabilities", frozenset())


def _may(request: Request, name: str, drafter: Drafter) -> bool:
    """A drafter can propose for the request: it is not switched off for it, nor for constrained ones only."""
    constrained = request.matcher is not None or "constrained" not in _capabilities(drafter)
    return constrained and name not in request.drafters_off


def _ask(drafter: Drafter, questions: Sequence[_Question]) -> Sequence[Draft | None]:
    contexts, budgets = [one.context for one in questions], [one.budget for one in questions]
    if "batched" in _capabilities(drafter):
        return cast(BatchedDrafter, drafter).propose_all(contexts, budgets)
    return [drafter.propose(*pair) for pair in zip(contexts, budgets, strict=True)]


def _guarded(request: Request, work: Callable[[], T]) -> T | None:
    """What `work` comes to. Should the grammar's matcher fail in it, its state is in doubt, and the request ends."""
    try:
        return work()
    except Exception as error:
        request.error = StepError(f"the grammar of {request.id} failed: {error!r}")
        return None


class Borrowed:
    """A matcher in the hands of drafters: `restore` takes back whatever they have left accepted."""

    def __init__(self, matcher: Matcher) -> None:
        self._lender: Matcher | None = matcher
        self._taken = 0

    @property
    def _matcher(self) -> Matcher:
        if self._lender is None:
            raise RuntimeError("a matcher is lent for one proposal only")
        return self._lender

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """The matcher's own."""
        self._matcher.fill(row)

    def forced(self) -> bytes:
        """The matcher's own."""
        return self._matcher.forced()

    def is_complete(self) -> bool:
        """The matcher's own."""
        return self._matcher.is_complete()

    def fork(self) -> Matcher:
        """The matcher's own."""
        return self._matcher.fork()

    def accept(self, token: int) -> bool:
        """Counted."""
        accepted = self._matcher.accept(token)
        self._taken += accepted
        return accepted

    def rollback(self, tokens: int) -> None:
        """Of what was accepted here only."""
        if tokens > self._taken:
            raise ValueError(f"{tokens} tokens to take back, but only {self._taken} were accepted")
        self._matcher.rollback(tokens)
        self._taken -= tokens

    def restore(self) -> None:
        """To where the matcher stood."""
        if self._taken:
            self.rollback(self._taken)

    def close(self) -> None:
        """Take everything back and lend it no longer: a drafter that hangs with it in hand must not change it later."""
        self.restore()
        self._lender = None


def _allowed(draft: Draft, lender: Matcher | None, stop_ids: frozenset[int]) -> Draft:
    """The draft without nodes that the grammar refuses or that end the text, and without what follows them."""
    matcher = Borrowed(lender) if lender is not None else None
    kept: set[int] = set()
    stands: list[int] = []  # the path that the matcher has accepted
    for node, parent in enumerate(draft.parents):
        if (parent >= 0 and parent not in kept) or draft.tokens[node] in stop_ids:
            continue
        if matcher is not None:
            path = draft.path(parent)
            if stands != path:
                matcher.restore()
                for above in path:
                    matcher.accept(draft.tokens[above])
            stands = path
            if not matcher.accept(draft.tokens[node]):
                continue
            stands = [*path, node]
        kept.add(node)
    if matcher is not None:
        matcher.restore()
    return draft if len(kept) == len(draft) else draft.picked(sorted(kept))
