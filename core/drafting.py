"""Asks the drafters and keeps the engine safe from them: a bad one is switched off for the request, never trusted."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from .batch import StepStats
from .deadline import Deadline
from .draft_size import Sizer
from .drafts import Draft, merge
from .errors import StepError
from .interfaces import DraftContext, Drafter, Matcher
from .request import Request

CANONICAL = "forced text was accepted without asking the model (forcing: canonical)"
LIMIT_S = 1.0  # a drafter that takes longer hangs
_HANGS = 3  # after so many a drafter is asked no more: each has left a thread behind
_UNCUT = 1 << 20

log = logging.getLogger(__name__)
Named = Sequence[tuple[str, Drafter]]


class Drafting:
    """All drafters of an engine, in the order of `spec:`, behind one `propose`. Earlier ones have first claim.

    With a `sizer` those that follow are given as many nodes as pay, the likeliest first, whoever proposed them.
    """

    def __init__(self, drafters: Named, vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self._leaders = [pair for pair in self.drafters if "leads" in _capabilities(pair[1])]
        self._followers = [pair for pair in self.drafters if pair not in self._leaders]
        self.vocab_size = vocab_size
        self.sizer: Sizer | None = None
        self.branches = True  # the model and its kernel take trees; else the likeliest path of each is run
        self.failures: Counter[str] = Counter()
        self.hangs: Counter[str] = Counter()
        self._threads = {
            name: Deadline(name, LIMIT_S) for name, drafter in self.drafters if "inline" not in _capabilities(drafter)
        }

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
        left = (drafter for name, drafter in self.drafters if name not in request.drafters_off)
        return any(request.matcher is not None or "constrained" not in _capabilities(drafter) for drafter in left)

    def propose(self, request: Request, budget: int) -> Draft | None:
        """One tree of at most `budget` nodes from all drafters, or None. Called once per decode segment and step."""
        if not self._able(request):
            return None
        context = DraftContext(
            request.id, request.tokens, request.prompt_len, request.namespace, request.matcher, request.params
        )
        try:
            draft = self._led(request, context, budget)
        except Exception as error:  # the grammar's matcher: its state is in doubt
            request.error = StepError(f"the grammar of {request.id} failed: {error!r}")
            return None
        if draft is not None and not self.branches and not draft.is_chain:
            draft = draft.picked(draft.likeliest())
        if draft is not None and draft.forced and CANONICAL not in request.notes:
            request.notes.append(CANONICAL)
        return draft

    def _led(self, request: Request, context: DraftContext, budget: int) -> Draft | None:
        """The leaders' draft, and behind its end what the others propose there."""
        lead = merge(self._proposals(self._leaders, request, context, budget), budget) or None
        if not self._followers or (room := budget - len(lead or ())) < 1:
            return lead
        chain = lead.tokens if lead is not None and lead.is_chain else ()
        matcher = Borrowed(request.matcher) if request.matcher is not None else None
        tokens = context.tokens + array("i", chain) if chain else context.tokens  # no copy of a text for nothing
        context = replace(context, tokens=tokens, matcher=matcher, chain=len(chain))
        if matcher is not None and not all(map(matcher.accept, chain)):
            raise ValueError("it refuses what it has accepted")
        rest = self._sized(request, context, room)
        if matcher is not None:
            matcher.restore()
        return merge([one for one in (lead, rest.behind(chain) if rest and chain else rest) if one], budget) or None

    def _sized(self, request: Request, context: DraftContext, budget: int) -> Draft | None:
        """What the followers propose together, as much of it as pays."""
        sizer = self.sizer
        if sizer is None:
            return merge(self._proposals(self._followers, request, context, budget), budget) or None
        asked = [pair for pair in self._followers if not sizer.skips(request, pair[0])]
        drafts = self._proposals(asked, request, context, budget)
        whole = merge(drafts, _UNCUT) if drafts else None
        return sizer.cut(request, [name for name, _ in asked], whole, budget)

    def _proposals(self, drafters: Named, request: Request, context: DraftContext, budget: int) -> list[Draft]:
        """What some drafters propose, without what the grammar refuses and what could not be written."""
        drafts = []
        for name, drafter in drafters:
            if name in request.drafters_off:
                continue
            matcher = Borrowed(context.matcher) if context.matcher is not None else None
            begin = time.perf_counter()
            draft = self._ask(name, drafter, request, replace(context, matcher=matcher), budget)
            if matcher is not None:
                matcher.close()
            draft = draft and _allowed(draft, context.matcher, request.stop_ids)
            if self.sizer is not None and (name, drafter) in self._followers:
                self.sizer.took(name, time.perf_counter() - begin)
                chain = context.tokens[len(context.tokens) - context.chain :]
                draft = self.sizer.judged(request, name, draft, chain) if draft else None
            drafts += [draft] if draft else []
        return drafts

    def _ask(self, name: str, drafter: Drafter, request: Request, context: DraftContext, budget: int) -> Draft | None:
        thread = self._threads.get(name)
        problem: str | None = "it has hung too often" if self.hangs[name] >= _HANGS else None
        draft: Draft | None = None
        try:
            if problem is None:
                ask = partial(drafter.propose, context, budget)
                draft = ask() if thread is None else thread.call(ask)
                problem = draft.problem(self.vocab_size, budget) if draft is not None else None
        except TimeoutError as error:
            self.hangs[name] += 1
            problem = str(error)
        except Exception as error:  # a stranger's code: its failure must not be the request's
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            return draft
        self.failures[name] += 1
        request.drafters_off.add(name)
        log.warning("drafter %s is switched off for request %s: %s", name, request.id, problem)
        return None

    def measured(self, stats: StepStats) -> None:
        """A step has been committed. Called once a step."""
        if self.sizer is not None:
            self.sizer.measured(stats)

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
