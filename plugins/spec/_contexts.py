"""An automaton over texts of many requests: which tokens followed each of their last few tokens, and how often.

A tree of contexts of bounded depth with suffix links (Cleary and Witten's PPM, 1984, with the update exclusion of
Moffat, 1990). From the context of a text's end it goes along with the text, one look-up a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ._lookup import doubt

ROOT = 0


class Contexts:
    """Contexts of up to `depth - 1` tokens and what followed them. Grows by at most `depth` nodes a token."""

    def __init__(self, depth: int) -> None:
        self._most = depth
        self._children: list[dict[int, int] | None] = [None]
        self._links = [ROOT]
        self._depths = [0]
        self._counts = [0]

    def __len__(self) -> int:
        """Nodes; one costs some 150 bytes."""
        return len(self._counts)

    def learn(self, state: int, token: int) -> int:
        """`token` followed the context `state`: the context after it. Contexts that knew it need not be told all."""
        first, below, node = -1, -1, state
        while True:
            children = self._children[node]
            if children is None:
                children = self._children[node] = {}
            child = children.get(token, -1)
            known = child >= 0
            if not known:
                child = children[token] = len(self._counts)
                self._children.append(None)
                self._links.append(ROOT)
                self._depths.append(self._depths[node] + 1)
                self._counts.append(0)
            self._counts[child] += 1
            if below >= 0:
                self._links[below] = child
            else:
                first = child
            if known or node == ROOT:
                return self._open(first)
            below, node = child, self._links[node]

    def find(self, tokens: Iterable[int]) -> int:
        """The longest context that these tokens end with."""
        state = ROOT
        for token in tokens:
            state = self.follow(state, token)
        return state

    def follow(self, state: int, token: int) -> int:
        """The longest known context after one more token."""
        while True:
            children = self._children[state]
            if children is not None and token in children:
                return self._open(children[token])
            if state == ROOT:
                return ROOT
            state = self._links[state]

    def _open(self, node: int) -> int:
        """A context that something may follow: of the deepest nodes the one that is a token shorter."""
        return node if self._depths[node] < self._most else self._links[node]

    def known(self, state: int, shortest: int) -> Context | None:
        """The longest context of the state, of at least `shortest` tokens, that anything has followed."""
        while self._depths[state] >= shortest:
            if self._children[state]:
                return Context(self, state, shortest)
            state = self._links[state]
        return None

    def followers(self, state: int, breadth: int) -> list[tuple[int, float, int]]:
        """The commonest tokens after a context: token, probability, node."""
        children = self._children[state] or {}
        counts = self._counts
        if len(children) == 1:  # most often
            [(token, child)] = children.items()
            return [(token, counts[child] / (counts[child] + doubt(self._depths[state])), self._open(child))]
        total = sum(counts[child] for child in children.values()) + doubt(self._depths[state])
        best = sorted(children.items(), key=lambda item: -counts[item[1]])[:breadth]
        return [(token, counts[child] / total, self._open(child)) for token, child in best]


@dataclass(frozen=True, slots=True)
class Context:
    """A place for `_tree.grow`."""

    contexts: Contexts
    state: int
    shortest: int

    def next(self, breadth: int) -> Iterable[tuple[int, float, Context]]:
        """Where nothing has followed yet, shorter contexts tell."""
        found = self.contexts.known(self.state, self.shortest)
        if found is None:
            return ()
        followers = self.contexts.followers(found.state, breadth)
        return [(token, likely, Context(self.contexts, after, self.shortest)) for token, likely, after in followers]
