"""Asks the drafters and keeps the engine safe from them: a bad one is switched off for the request, never trusted."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .drafts import Draft, merge
from .errors import StepError
from .interfaces import DraftContext, Drafter, Matcher
from .request import Request

CANONICAL = "forced text was accepted without asking the model (forcing: canonical)"

log = logging.getLogger(__name__)
Named = Sequence[tuple[str, Drafter]]


class Drafting:
    """All drafters of an engine, in the order of `spec:`, behind one `propose`. Earlier ones have first claim."""

    def __init__(self, drafters: Named, vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self._leaders = [pair for pair in self.drafters if "leads" in _capabilities(pair[1])]
        self._followers = [pair for pair in self.drafters if pair not in self._leaders]
        self.vocab_size = vocab_size
        self.failures: Counter[str] = Counter()

    def active(self, request: Request) -> bool:
        """True if any drafter may still propose for the request. Some do under a grammar only."""
        left = (drafter for name, drafter in self.drafters if name not in request.drafters_off)
        return any(request.matcher is not None or "constrained" not in _capabilities(drafter) for drafter in left)

    def propose(self, request: Request, budget: int) -> Draft | None:
        """One tree of at most `budget` nodes from all drafters, or None. Called once per decode segment and step."""
        if not self.active(request):
            return None
        context = DraftContext(
            request.id, request.tokens, request.prompt_len, request.namespace, request.matcher, request.params
        )
        try:
            draft = self._led(request, context, budget)
        except Exception as error:  # the grammar's matcher: its state is in doubt
            request.error = StepError(f"the grammar of {request.id} failed: {error!r}")
            return None
        if draft is not None and draft.forced and CANONICAL not in request.notes:
            request.notes.append(CANONICAL)
        return draft

    def _led(self, request: Request, context: DraftContext, budget: int) -> Draft | None:
        """The leaders' draft, and behind its end what the others propose there."""
        lead = self._merged(self._leaders, request, context, budget)
        if not self._followers or (room := budget - len(lead or ())) < 1:
            return lead
        chain = lead.tokens if lead is not None and lead.is_chain else ()
        matcher = Borrowed(request.matcher) if request.matcher is not None else None
        tokens = context.tokens + array("i", chain) if chain else context.tokens  # no copy of a text for nothing
        context = replace(context, tokens=tokens, matcher=matcher)
        if matcher is not None and not all(map(matcher.accept, chain)):
            raise ValueError("it refuses what it has accepted")
        rest = self._merged(self._followers, request, context, room)
        if matcher is not None:
            matcher.restore()
        return merge([one for one in (lead, rest.behind(chain) if rest and chain else rest) if one], budget) or None

    def _merged(self, drafters: Named, request: Request, context: DraftContext, budget: int) -> Draft | None:
        """What some drafters propose together, without what the grammar refuses."""
        matcher = Borrowed(context.matcher) if context.matcher is not None else None
        context = replace(context, matcher=matcher)
        drafts = []
        for name, drafter in drafters:
            draft = self._ask(name, drafter, request, context, budget) if name not in request.drafters_off else None
            if matcher is not None:
                matcher.restore()
                draft = draft and _allowed(draft, matcher, request.stop_ids)
            drafts += [draft] if draft else []
        return merge(drafts, budget) or None

    def _ask(self, name: str, drafter: Drafter, request: Request, context: DraftContext, budget: int) -> Draft | None:
        try:
            draft = drafter.propose(context, budget)
            problem = draft.problem(self.vocab_size, budget) if draft is not None else None
        except Exception as error:  # a stranger's code: its failure must not be the request's
            draft, problem = None, f"{type(error).__name__}: {error}"
        if problem is None:
            return draft
        self.failures[name] += 1
        request.drafters_off.add(name)
        log.warning("drafter %s is switched off for request %s: %s", name, request.id, problem)
        return None

    def forget(self, request: Request) -> None:
        """The request has ended."""
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
        self._matcher, self._taken = matcher, 0
        self.fill, self.forced, self.is_complete = matcher.fill, matcher.forced, matcher.is_complete
        self.fork = matcher.fork

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


def _allowed(draft: Draft, matcher: Borrowed, stop_ids: frozenset[int]) -> Draft:
    """The draft without nodes that the grammar refuses or that end the text, and without what follows them."""
    kept: list[int] = []
    stands: list[int] = []  # the path that the matcher has accepted
    for node, parent in enumerate(draft.parents):
        if (parent >= 0 and parent not in kept) or draft.tokens[node] in stop_ids:
            continue
        path = draft.path(parent)
        if stands != path:
            matcher.restore()
            for above in path:
                matcher.accept(draft.tokens[above])
        stands = path
        if matcher.accept(draft.tokens[node]):
            stands = [*path, node]
            kept.append(node)
    matcher.restore()
    if len(kept) == len(draft):
        return draft
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    parents = tuple(place[draft.parents[node]] for node in kept)
    forced = sum(i == node < draft.forced for i, node in enumerate(kept))
    return Draft(tuple(draft.tokens[node] for node in kept), parents, forced=forced)
