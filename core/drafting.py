"""Asks the drafters and keeps the engine safe from them: a bad one is switched off for the request, never trusted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from .drafts import Draft, merge
from .interfaces import DraftContext, Drafter
from .request import Request

log = logging.getLogger(__name__)


class Drafting:
    """All drafters of an engine, in the order of `spec:`, behind one `propose`. Earlier ones have first claim."""

    def __init__(self, drafters: Sequence[tuple[str, Drafter]], vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self.vocab_size = vocab_size
        self.failures: Counter[str] = Counter()

    def active(self, request: Request) -> bool:
        """True if any drafter may still propose for the request."""
        return any(name not in request.drafters_off for name, _ in self.drafters)

    def propose(self, request: Request, budget: int) -> Draft | None:
        """One tree of at most `budget` nodes from all drafters, or None. Called once per decode segment and step."""
        if not self.drafters:
            return None
        context = DraftContext(
            request.id, request.tokens, request.prompt_len, request.namespace, request.matcher, request.params
        )
        drafts = []
        for name, drafter in self.drafters:
            if name not in request.drafters_off:
                draft = self._ask(name, drafter, request, context, budget)
                if draft:
                    drafts.append(draft)
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
