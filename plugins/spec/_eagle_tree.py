"""A draft in the making: a tree whose likeliest tips are gone on from, level by level (EAGLE-2, arXiv:2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phloem.batch import IntArray
from phloem.drafts import Draft
from phloem.interfaces import DraftContext

from ._eagle_entries import Query

LONGEST_LEAD = 8  # tokens of a leader that the head follows: each costs a pass, and is further from what it has seen


@dataclass(slots=True, eq=False)
class Growing:
    """One request's draft. First the leader's tokens are followed, if there are any; then it branches."""

    context: DraftContext
    budget: int  # most nodes
    levels: int  # most levels
    breadth: int  # children of a node, and nodes of a level that are gone on from
    rows: range  # rows for its entries, behind the pool
    tokens: list[int] = field(default_factory=list)  # of the nodes found so far
    parents: list[int] = field(default_factory=list)  # -1: the text's end
    chances: list[float] = field(default_factory=list)  # of each once its parent is taken
    values: list[float] = field(default_factory=list)  # and of its whole path
    tips: list[int] = field(default_factory=lambda: [-1])  # nodes that were asked about last, -1: the text's end
    depth: int = 0
    _lead: int = 0  # of the text's last token and the leader's, the next to be asked about
    _used: int = 0
    _root: Query | None = None
    _asked: dict[int, Query] = field(default_factory=dict)  # by node
    _committed: IntArray | None = None

    def begin(self) -> bool:
        """False where there is nothing to go on from: no feature of the token before the last, or too long a lead."""
        context = self.context
        last = len(context.tokens) - context.chain - 1
        if context.slots is None or last < 1 or len(context.slots) != last or context.chain > LONGEST_LEAD:
            return False
        self._committed = context.slots[1:]
        return self.budget > 0 and self.levels > 0

    def queries(self) -> list[Query]:
        """What to ask next; [] when the draft is done."""
        if self._lead <= self.context.chain:
            self._root = self._follow()
            return [self._root]
        if self.depth >= min(self.levels, self.budget):
            return []
        newest = [node for node, parent in enumerate(self.parents) if parent in self.tips]
        self.tips = sorted(newest, key=lambda node: -self.values[node])[: self.breadth]
        return [self._ask(node) for node in self.tips]

    @property
    def leading(self) -> bool:
        """The last answer was about the leader's tokens, and there are more of them: it is of no use."""
        return self._lead <= self.context.chain

    def branch(self, tip: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """The likeliest children of a tip, best first; those without a chance are none."""
        above = self.values[tip] if tip >= 0 else 1.0
        for token, chance in zip(tokens, chances, strict=True):
            if chance > 0:
                self.tokens.append(token)
                self.parents.append(tip)
                self.chances.append(min(1.0, chance))
                self.values.append(above * chance)

    def draw(self, tip: int, chances: npt.NDArray[np.floating]) -> None:
        """A child of a tip by chance, for rejection sampling: chances [vocab] of the target."""
        assert self.context.draws is not None, "it is to be drawn"
        if chances.any():
            self.branch(tip, self.context.draws.draw(chances, tip), [1.0])

    def path(self, node: int) -> list[int]:
        """Tokens from the text's end down to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def draft(self) -> Draft | None:
        """The likeliest nodes, as many as the budget has, their likeliest path first: following it moves no KV."""
        if self.context.draws is not None:
            return self.context.draws.close()
        best = sorted(range(len(self.values)), key=lambda node: -self.values[node])  # stable: parents come first
        kept = sorted(best[: self.budget])
        if not kept:
            return None
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens, parents = tuple(self.tokens[node] for node in kept), tuple(place[self.parents[node]] for node in kept)
        draft = Draft(tokens, parents, confidence=tuple(self.chances[node] for node in kept))
        path = draft.likeliest()
        return draft.picked([*path, *sorted(set(range(len(draft))) - set(path))])

    def _follow(self) -> Query:
        """The text's last token, then those of the leader, one after another."""
        context, committed = self.context, self._committed
        assert committed is not None, "`begin` has said so"
        assert context.slots is not None
        at = len(context.tokens) - context.chain - 1 + self._lead
        before, above = (int(context.slots[-1]), []) if self._root is None else (self._root.path[-1], self._root.path)
        self._lead += 1
        return Query(context.tokens[at], at, before, committed, [*above, self._row()])

    def _ask(self, node: int) -> Query:
        above = self._root if self.parents[node] < 0 else self._asked[self.parents[node]]
        assert above is not None, "the text's end comes first"
        path = [*above.path, self._row()]
        query = Query(self.tokens[node], above.position + 1, above.path[-1], above.committed, path)
        self._asked[node] = query
        return query

    def _row(self) -> int:
        self._used += 1
        return self.rows[self._used - 1]
