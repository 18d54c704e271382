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


class Drafting:
    """All drafters of an engine, in the order of `spec:`, behind one `propose`. Earlier ones have first claim."""

    def __init__(self, drafters: Sequence[tuple[str, Drafter]], vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self.vocab_size = vocab_size
        self.failures: Counter[str] = Counter()

    def active(self, request: Request) -> bool:
        """True if any drafter may still propose for the request. Some do under a grammar only."""
        free = request.matcher is None
        return any(
            name not in request.drafters_off and not (free and "constrained" in _capabilities(drafter))
            for name, drafter in self.drafters
        )

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
        leaders = [pair for pair in self.drafters if "leads" in _capabilities(pair[1])]
        followers = [pair for pair in self.drafters if pair not in leaders]
        lead = self._merged(leaders, request, context, budget)
        if not followers or (lead is not None and len(lead) >= budget):
            return lead
        chain = lead.tokens if lead is not None and lead.is_chain else ()
        matcher = request.matcher
        taken = 0
        try:
            if matcher is not None and chain:
                taken = next((i for i, token in enumerate(chain) if not matcher.accept(token)), len(chain))
            if taken == len(chain):
                context = replace(context, tokens=context.tokens + array("i", chain)) if chain else context
                rest = self._merged(followers, request, context, budget - len(chain))
                lead = _joined(chain, lead, rest)
        finally:
            if matcher is not None and taken:
                matcher.rollback(taken)
        return lead

    def _merged(
        self, drafters: Sequence[tuple[str, Drafter]], request: Request, context: DraftContext, budget: int
    ) -> Draft | None:
        """What some drafters propose together, without what the grammar refuses."""
        asked = ((name, drafter) for name, drafter in drafters if name not in request.drafters_off)
        drafts = [draft for name, drafter in asked if (draft := self._ask(name, drafter, request, context, budget))]
        if request.matcher is not None:
            drafts = [kept for draft in drafts if (kept := _allowed(draft, request.matcher))]
        return merge(drafts, budget) if drafts else None

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


def _joined(chain: Sequence[int], lead: Draft | None, rest: Draft | None) -> Draft | None:
    """The leader's chain, and what the others hang on its end."""
    if lead is None or rest is None:
        return lead or rest
    above = len(chain)
    parents = (*lead.parents, *(parent + above for parent in rest.parents))
    return Draft((*lead.tokens, *rest.tokens), parents, forced=lead.forced)


def _allowed(draft: Draft, matcher: Matcher) -> Draft | None:
    """The draft without nodes that the grammar refuses, and without what follows them: their rows would be wasted."""
    kept: list[int] = []
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent >= 0 and parent not in kept:
            continue
        while path and path[-1] != parent:
            path.pop()
            matcher.rollback(1)
        if parent >= 0 and not path:  # back down to a node whose subtree was left
            path = draft.path(parent)
            for above in path:
                matcher.accept(draft.tokens[above])
        if matcher.accept(draft.tokens[node]):
            path.append(node)
            kept.append(node)
    if path:
        matcher.rollback(len(path))
    if len(kept) == len(draft):
        return draft
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    tokens, parents = [draft.tokens[node] for node in kept], [place[draft.parents[node]] for node in kept]
    forced = next((i for i, node in enumerate(kept) if i != node), len(kept))
    return Draft(tuple(tokens), tuple(parents), forced=min(draft.forced, forced)) if kept else None
