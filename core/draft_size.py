"""How many nodes a draft gets: by what this request's drafts came to, and what a row costs at the present batch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .batch import StepStats
from .draft_cost import VerifyCost
from .drafts import Draft
from .request import Request

UNKNOWN = 0.7  # confidence of a node whose drafter gives none
_BUCKETS = 10
_PRIOR, _SURE = 8.0, 0.99  # tests that a drafter's own word counts for, and the most that is believed
_FADE = 0.97  # of what a request's earlier tests count, with each new one
_MOST_IDLE = 64  # tokens that a drafter in vain is left out for at most
_NEWS = 0.2  # weight of a new proposal in what they were worth of late
_DEAR = 0.01  # share of a request's part of a step that asking in vain may take


@dataclass(slots=True)
class _Record:
    """What one drafter proposed last for one request, and how its proposals have done there."""

    length: int = 0  # of the text the draft continues
    chain: tuple[int, ...] = ()  # a leader's, at the end of that text
    draft: Draft | None = None
    tested: float = 0.0  # what acceptance was expected of nodes whose place the text has come to
    hits: float = 0.0
    vain: int = 0  # proposals in a row of which nothing was taken up
    won: float = 1.0  # tokens that a proposal was worth of late, beyond what verifying it takes
    until: int = 0  # length of the text before which it is not asked
    probes: bool = False  # it is asked to learn whether its drafts would pay


@dataclass(slots=True)
class _Habit:
    """How often nodes of each confidence are accepted, over all greedy requests of a drafter, or over all others."""

    tested: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    hits: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    places: float = 0.0  # where the text has come to with proposals there, and how many of these it went on with
    taken: float = 0.0


@dataclass(slots=True)
class _Price:
    """What asking a drafter takes, and what comes of it."""

    seconds: float = 0.0  # for one request
    level_s: float = 0.0  # of that for each level of the draft
    width: int = 1  # most children of a node, where they were drawn


class Sizer:
    """Owned by `Drafting`. Each proposal is held against the text that came, whether it was verified or not."""

    def __init__(self, cost: VerifyCost) -> None:
        self.cost = cost
        self._records: dict[str, dict[str, _Record]] = {}
        self._habits: dict[tuple[str, bool], _Habit] = {}
        self._prices: dict[str, _Price] = {}
        self._rests: dict[str, int] = {}  # length of a request's text before which it is not asked ahead
        self._asking = 0.0  # seconds of the step being planned
        self._chosen: list[tuple[Request, Sequence[str], int, float]] = []  # of that step: nodes, and what they bring

    def skips(self, request: Request, name: str) -> bool:
        """Whether to leave a drafter out this time: asking it is dear, and has been in vain."""
        record = self._record(request, name)
        self._learn(self._habit(name, request), record, request.tokens)
        return len(request.tokens) < record.until

    def rests(self, request: Request) -> bool:
        """Nothing is expected of the request's drafters at its present length: it may run ahead without them."""
        return len(request.tokens) < self._rests.get(request.id, 0)

    def took(self, name: str, seconds: float, requests: int = 1, drafts: Sequence[Draft] = ()) -> None:
        """What asking a drafter has cost, for so many requests and with these drafts. None of them: no price of any."""
        price = self._price(name)
        self._asking += seconds
        if not requests:
            return
        levels = max((max(draft.depths()) for draft in drafts), default=1)
        drawn = [max(Counter(draft.parents).values()) for draft in drafts if draft.drawn is not None]
        price.width = max(drawn, default=price.width)
        each = min(seconds / requests, 3 * (price.seconds or seconds))  # a long prompt that it reads is no measure
        price.seconds += 0.1 * (each - price.seconds)
        price.level_s += 0.1 * (each / levels - price.level_s)

    def width(self, name: str) -> int:
        """Most children of a node in a drafter's last drafts that were drawn."""
        return self._price(name).width

    def pays(self, request: Request, name: str, budget: int, width: int = 1) -> int:
        """How many levels to ask for where each costs the drafter a pass; known before there is a draft to look at.

        At most `budget` nodes, of which each level has `width`, which are verified whatever they are. So what is drawn
        by chance has no say in what is verified (design §6).
        """
        record, habit = self._record(request, name), self._habit(name, request)
        usual = (habit.taken + _PRIOR * UNKNOWN) / (habit.places + _PRIOR)
        chance = min(_SURE, usual * (record.hits + 2.0) / (record.tested + 2.0))
        most = -(-budget // width)
        levels = self.cost.pays([chance**level for level in range(1, most + 1)], self._price(name).level_s, width)
        record.probes = not levels
        return levels

    def judged(self, request: Request, name: str, draft: Draft, chain: Sequence[int]) -> Draft:
        """The proposal with chances in place of the drafter's own confidence."""
        record, habit = self._record(request, name), self._habit(name, request)
        record.length, record.chain, record.draft = len(request.tokens), tuple(chain), draft
        own = (record.hits + 2.0) / (record.tested + 2.0)
        chances = [min(_SURE, _habitual(habit, each) * own) for each in draft.confidence or [UNKNOWN] * len(draft)]
        return replace(draft, confidence=tuple(chances))

    def cut(self, request: Request, names: Sequence[str], draft: Draft | None, budget: int) -> Draft | None:
        """The most valuable nodes of what the drafters `names` proposed, as many as pay; the likeliest path first.

        What was drawn for rejection sampling stays as it is: `pays` has sized it.
        """
        if draft is not None and draft.drawn is not None:
            self.cost.grant(len(draft))
            self._note(request, names, True)
            return draft
        kept, won = self._pick(draft, budget) if draft else ([], 0.0)
        self._chosen.append((request, names, len(kept), won))
        if draft is None or not kept:
            return None
        draft = draft.picked(sorted(kept))
        path = draft.likeliest()  # first: following it moves no KV (design §5)
        return draft.picked([*path, *sorted(set(range(len(draft))) - set(path))])

    def settle(self, *, paid: bool) -> bool:
        """Whether what has been cut in this step is verified. Called once a step, after all cuts.

        All of it together must bring what the first draft of a step costs, unless that is `paid` for other drafts.
        """
        chosen, self._chosen = self._chosen, []
        verified = paid or self.cost.covers(sum(won for *_, won in chosen))
        for request, names, nodes, won in chosen:
            self._note(request, names, verified and nodes > 0, won)
            if not verified:
                self.cost.grant(-nodes)
        return verified

    def measured(self, stats: StepStats) -> None:
        """A step has been committed."""
        asking, self._asking = self._asking, 0.0
        self.cost.measured(stats, asking)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for name, record in self._records.pop(request.id, {}).items():
            self._learn(self._habit(name, request), record, request.tokens)
        self._rests.pop(request.id, None)

    def _record(self, request: Request, name: str) -> _Record:
        return self._records.setdefault(request.id, {}).setdefault(name, _Record())

    def _habit(self, name: str, request: Request) -> _Habit:
        return self._habits.setdefault((name, request.params.greedy), _Habit())

    def _price(self, name: str) -> _Price:
        return self._prices.setdefault(name, _Price())

    def _pick(self, draft: Draft, budget: int) -> tuple[list[int], float]:
        """The most valuable nodes, as many as pay, and the tokens that they bring beyond what they cost."""
        values: list[float] = []
        assert draft.confidence is not None
        for parent, chance in zip(draft.parents, draft.confidence, strict=True):
            values.append(chance if parent < 0 else values[parent] * chance)
        best = sorted(range(len(values)), key=lambda node: -values[node])[:budget]  # stable: parents come first
        nodes, won = self.cost.worth([values[node] for node in best])
        return best[:nodes], won

    def _note(self, request: Request, names: Sequence[str], taken: bool, won: float | None = None) -> None:
        """Let drafters rest that are asked in vain, or whose drafts have brought less than asking takes (`won`).

        Each for as long as brings the cost of asking down; a request that runs ahead loses more by it.
        """
        vain = 0
        part = self.cost.plain_s(self.cost.requests) / self.cost.requests
        for name in names:
            record, asking = self._record(request, name), self._price(name).seconds
            record.vain = 0 if taken else record.vain + 1
            if won is not None:
                record.won += _NEWS * (won - record.won)
            pays = taken and not record.probes and (won is None or record.won >= asking * self.cost.rate)
            idle = 0 if pays else min(_MOST_IDLE, int(asking / (_DEAR * part)))
            record.until = len(request.tokens) + 1 + idle
            vain = max(vain, record.vain)
        if names:
            self._rests[request.id] = len(request.tokens) + (min(_MOST_IDLE, 1 << min(vain, 7)) if vain > 1 else 0)

    def _learn(self, habit: _Habit, record: _Record, text: array[int]) -> None:
        """Hold the last proposal against what has been written since."""
        draft, start = record.draft, record.length
        if draft is None or len(text) <= start:
            return
        record.draft = None
        came = text[start : start + len(record.chain) + len(draft) + 1].tolist()
        chain = len(record.chain)
        if tuple(came[:chain]) != record.chain[: len(came)]:
            return
        reached = {-1: 0}  # nodes on the text's path: tokens up to them
        places: dict[int, bool] = {}  # those of them that have children the text has come to: whether one was right
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            at = reached.get(parent)
            if at is None or chain + at >= len(came):
                continue
            hit = came[chain + at] == token
            places[parent] = places.get(parent, False) or hit
            if hit:
                reached[node] = at + 1
            own = draft.confidence[node] if draft.confidence is not None else UNKNOWN
            bucket = _bucket(own)
            record.tested = record.tested * _FADE + _habitual(habit, own)
            record.hits = record.hits * _FADE + hit
            habit.tested[bucket] = habit.tested[bucket] * 0.999 + 1
            habit.hits[bucket] = habit.hits[bucket] * 0.999 + hit
        for hit in places.values():
            habit.places = habit.places * 0.999 + 1
            habit.taken = habit.taken * 0.999 + hit


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))


def _habitual(habit: _Habit, confidence: float) -> float:
    """What a drafter's confidence has come to, its own word standing in while there is little to go by."""
    bucket = _bucket(confidence)
    return (habit.hits[bucket] + _PRIOR * confidence) / (habit.tested[bucket] + _PRIOR)
