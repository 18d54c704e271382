"""Draws for rejection sampling: a drafter draws its nodes here and nowhere else, so that what is verified was drawn.

Rejection sampling is exact only for children drawn from the very probabilities it divides by, none of them chosen,
ranked, pruned or merged afterwards (design §6). So the drafter is handed this in place of a promise: it tells the
probabilities, the draw is made for it, and the draft is the record of what was drawn.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from .drafts import Draft

Floats = npt.NDArray[np.floating]


class Chance(Protocol):
    """What happens by chance in drawing and verifying. Tests take both ways, to count every outcome exactly."""

    def happens(self, probability: float) -> bool:
        """True with this probability; above 1 always."""

    def pick(self, weights: Floats) -> int:
        """An index [0, K) with probability weights[index] / sum. Weights [K] are finite, none negative, not all 0."""


class Dice:
    """Chance itself, of the system's entropy: so independent of the target's noise, which is a function of seeds."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)

    def happens(self, probability: float) -> bool:
        """As `Chance`."""
        return bool(self._random.random() < probability)

    def pick(self, weights: Floats) -> int:
        """As `Chance`: by the inverse of the cumulated weights, in float64. Some 60 us for 49,152 of them."""
        sums = np.cumsum(weights, dtype=np.float64)
        place = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        if place >= len(sums) or not weights[place]:  # the product was rounded up to the sum
            place = int(np.flatnonzero(weights)[-1])
        return place


class Draws:
    """One draft, drawn node by node. Made by the engine for a request whose draft rejection sampling will verify."""

    def __init__(self, chance: Chance, vocab_size: int, budget: int) -> None:
        self._chance, self._vocab_size, self._budget = chance, vocab_size, budget
        # Token, parent, and what it was drawn from: one list, as a drafter may be left behind in the midst of a draw.
        self._nodes: list[tuple[int, int, Floats]] = []
        self._closed = False

    def draw(self, probabilities: Floats, parent: int = -1, count: int = 1) -> list[int]:
        """Draw children of a node (-1: the text's end), without replacement; their tokens, which are the next nodes.

        `probabilities` [vocab] need not sum to 1 and must stay as they are. Fewer children come where fewer tokens
        have any. A node's children are drawn in one call, in the order in which they will be tried; whether and how
        many may depend on nodes above and on siblings drawn before, on nothing else. Raises ValueError.
        """
        self._check(probabilities, parent, count)
        left = np.array(probabilities, dtype=np.float64)
        tokens = []
        for _ in range(min(count, int(np.count_nonzero(left)))):
            token = self._chance.pick(left)
            left[token] = 0.0
            tokens.append(token)
        self._nodes += [(token, parent, probabilities) for token in tokens]
        return tokens

    def _check(self, probabilities: Floats, parent: int, count: int) -> None:
        if self._closed:
            raise ValueError("draws are lent for one proposal only")
        if not -1 <= parent < len(self._nodes):
            raise ValueError(f"node {parent} is not drawn yet")
        if any(parent == above for _, above, _ in self._nodes):
            raise ValueError(f"node {parent} has its children: they are drawn in one call, without replacement")
        if not 1 <= count <= self._budget - len(self._nodes):
            raise ValueError(f"{count} more nodes, but {self._budget - len(self._nodes)} are left of the budget")
        if probabilities.shape != (self._vocab_size,):
            raise ValueError(f"probabilities of shape {probabilities.shape}, the vocabulary has {self._vocab_size}")
        total = float(probabilities.sum(dtype=np.float64))
        if not (0 < total < np.inf) or bool((probabilities < 0).any()):
            raise ValueError("probabilities must be finite, none negative, not all 0")

    def __len__(self) -> int:
        return len(self._nodes)

    def close(self) -> Draft | None:
        """What was drawn; nothing is drawn any more.

        What a drafter that failed half-way had drawn is verified, too: leaving it out would be pruning.
        """
        self._closed = True
        if not self._nodes:
            return None
        tokens, parents, drawn = zip(*self._nodes, strict=True)
        return Draft(tokens, parents, drawn=drawn)

    def problem(self, draft: Draft | None) -> str | None:
        """Why a drafter's answer is not what it drew, or None."""
        tokens, parents = ((), ()) if draft is None else (draft.tokens, draft.parents)
        mine = [(token, parent) for token, parent, _ in self._nodes]
        theirs = list(zip(tokens, parents, strict=True))
        if mine == theirs:
            return None
        if not mine:
            return f"its {len(theirs)} nodes were not drawn: for rejection sampling they come from `context.draws`"
        return f"it drew {len(mine)} nodes and proposes {len(theirs)}, not the same: what is drawn is never chosen from"
