"""Draft trees: proposed tokens and their parents, in the order they are laid out in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of proposed continuations of a request's last token.

    `tokens[i]` continues the path that ends at node `parents[i]`; -1 is the request's last token. Parents come
    before their children. Sibling nodes carry distinct tokens. The first `forced` nodes are a chain from the root that
    is accepted without asking the target: lossy, so only a drafter that was configured for it says so.
    `confidence[i]`, where given, is the drafter's own guess of how likely the target is to take node i once it has
    taken its parent: it may size a draft, and decides nothing. `drawn[i]`, [vocab] floats that siblings share, is what
    node i was drawn from, where rejection sampling is to verify the draft: only `Draws` sets it, and only the whole
    draft, or a beginning of it, keeps it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    forced: int = 0
    confidence: tuple[float, ...] | None = None
    drawn: tuple[npt.NDArray[np.floating], ...] | None = field(default=None, compare=False)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Draft:
        """A single path: the usual shape of n-gram and grammar drafts."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @property
    def is_chain(self) -> bool:
        """A single path."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def problem(self, vocab_size: int, budget: int) -> str | None:
        """Why this draft is nonsense, or None. Drafters are strangers' code: the engine checks each draft."""
        if len(self.tokens) != len(self.parents):
            return f"{len(self.tokens)} tokens but {len(self.parents)} parents"
        if len(self.tokens) > budget:
            return f"{len(self.tokens)} tokens exceed the budget of {budget}"
        seen: set[tuple[int, int]] = set()
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                return f"token {token} at node {i} is outside the vocabulary of {vocab_size}"
            if not -1 <= parent < i:
                return f"parent {parent} of node {i} does not come before it"
            if (parent, token) in seen:
                return f"node {i} repeats token {token} under parent {parent}"
            seen.add((parent, token))
        if not self.truncated(self.forced).is_chain:
            return f"the first {self.forced} nodes are forced, but no chain"
        if self.confidence is not None:
            if len(self.confidence) != len(self.tokens):
                return f"{len(self.tokens)} tokens but {len(self.confidence)} confidences"
            if not all(0 <= each <= 1 for each in self.confidence):
                return "a confidence is no probability"
        return None

    def depths(self) -> list[int]:
        """Distance of each node from the request's last token; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """[m, m] matrix, True where column j is node i itself or one of its ancestors."""
        m = len(self.tokens)
        mask = np.zeros((m, m), dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                mask[i] = mask[parent]
            mask[i, i] = True
        return mask

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def likeliest(self) -> list[int]:
        """Nodes of the path that takes the most confident child at each node; the first one where none is."""
        path: list[int] = []
        best = {-1: -1.0}
        for node, parent in enumerate(self.parents):
            own = self.confidence[node] if self.confidence is not None else 0.0
            if parent in path or parent < 0:
                above = path.index(parent) + 1 if parent >= 0 else 0
                if own > best.get(parent, -1.0):
                    best[parent] = own
                    path[above:] = [node]
        return path

    def chained(self) -> Draft:
        """Its likeliest path. Of what was drawn that is the first child of each node, which is a draw all the same."""
        if self.is_chain:
            return self
        path = self.likeliest()
        return replace(self.picked(path), drawn=None if self.drawn is None else tuple(self.drawn[i] for i in path))

    def behind(self, chain: Sequence[int]) -> Draft:
        """This tree at the end of `chain`, which is taken to be certain."""
        above = len(chain)
        parents = (*range(-1, above - 1), *(parent + above for parent in self.parents))
        confidence = None if self.confidence is None else (*(1.0 for _ in chain), *self.confidence)
        return Draft((*chain, *self.tokens), parents, confidence=confidence)

    def picked(self, nodes: Sequence[int]) -> Draft:
        """Only these nodes, in this order: each behind its parent, which must be among them."""
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        confidence = None if self.confidence is None else tuple(self.confidence[node] for node in nodes)
        parents = tuple(place[self.parents[node]] for node in nodes)
        forced = next((i for i, node in enumerate(nodes) if i != node or node >= self.forced), len(nodes))
        return Draft(tuple(self.tokens[node] for node in nodes), parents, forced, confidence)

    def truncated(self, keep: int) -> Draft:
        """The first `keep` nodes; parents precede children, so the rest is still a tree."""
        if keep >= len(self.tokens):
            return self
        return replace(self.picked(range(keep)), drawn=None if self.drawn is None else self.drawn[:keep])


def merge(drafts: Sequence[Draft], budget: int) -> Draft:
    """One tree from several drafters' proposals, earlier drafters first, cut to `budget` nodes.

    Nodes with equal path are shared. What several have proposed was not drawn (`drawn`): a merged draft is verified by
    the target's own samples (design §6). Of a shared node the higher confidence counts; all must give theirs, else
    there are none.
    """
    if len(drafts) == 1:
        return drafts[0].truncated(budget)
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    index: dict[tuple[int, int], int] = {}
    for draft in drafts:
        where: list[int] = []
        for token, parent, own in zip(draft.tokens, draft.parents, draft.confidence or [0.0] * len(draft), strict=True):
            at = -1 if parent < 0 else where[parent]
            if parent >= 0 and at < 0:  # the parent fell to the budget
                where.append(-1)
                continue
            node = index.get((at, token), -1)
            if node >= 0:
                confidence[node] = max(confidence[node], own)
            elif len(tokens) < budget:
                node = index[(at, token)] = len(tokens)
                tokens.append(token)
                parents.append(at)
                confidence.append(own)
            where.append(node)
    forced = min(drafts[0].forced, budget) if drafts else 0
    known = tuple(confidence) if all(draft.confidence is not None for draft in drafts) else None
    return Draft(tuple(tokens), tuple(parents), forced, known)
