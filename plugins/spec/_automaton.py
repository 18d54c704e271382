"""A suffix automaton that grows with its text: every string in it, what followed, and about how often.

Blumer et al., The smallest automaton recognizing the subwords of a text (1985). A token costs constant time on
average, here some three microseconds. Of several texts one after another it holds each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._lookup import doubt

ROOT = 0
_COUNTED = 8  # suffixes of a text's end that are counted; shorter ones are counted less often than they come


class Automaton:
    """States are sets of strings that end at the same places; a link leads to the longest suffix that ends elsewhere.

    Most states have one way on, kept in two arrays; only the others have a dictionary.
    """

    def __init__(self) -> None:
        self._lengths = array("i", [0])
        self._links = array("i", [-1])
        self._counts = array("i", [0])
        self._tokens = array("i", [-1])
        self._targets = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        """Tokens taken in; one costs some 100 bytes."""
        return self.tokens

    def step(self, state: int, token: int) -> int:
        """The state after one more token, or -1."""
        if self._tokens[state] == token:
            return self._targets[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def extend(self, last: int, token: int) -> int:
        """`token` follows a text that ends in state `last`: the state it ends in now."""
        self.tokens += 1
        known = self.step(last, token)
        if known >= 0:  # an earlier text went on like this
            now = known if self._lengths[known] == self._lengths[last] + 1 else self._split(last, known, token)
        else:
            now = self._state(self._lengths[last] + 1)
            at = last
            while at >= 0 and self.step(at, token) < 0:
                self._connect(at, token, now)
                at = self._links[at]
            if at >= 0:
                there = self.step(at, token)
                exact = self._lengths[there] == self._lengths[at] + 1
                self._links[now] = there if exact else self._split(at, there, token)
        self._count(now)
        return now

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix of `tokens` that is in here, and its length."""
        state = length = 0
        for token in tokens:
            while (after := self.step(state, token)) < 0 and state != ROOT:
                state = self._links[state]
                length = self._lengths[state]
            if after >= 0:
                state, length = after, length + 1
        return state, length

    def suffix(self, last: int) -> tuple[int, int]:
        """The longest suffix of a text that stands elsewhere as well, and its length. `last`: where the text ends."""
        state = max(ROOT, self._links[last])
        return state, self._lengths[state]

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Tokens that followed: token, state after it, count."""
        more = self._more.get(state, {})
        if self._tokens[state] < 0:
            return []
        found = [(self._tokens[state], self._targets[state]), *more.items()]
        return [(token, target, self._counts[target]) for token, target in found]

    def _state(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(ROOT)
        self._counts.append(0)
        self._tokens.append(-1)
        self._targets.append(-1)
        return len(self._lengths) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._tokens[state] in (-1, token):
            self._tokens[state], self._targets[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _split(self, above: int, state: int, token: int) -> int:
        """Part from `state` its shorter strings, those that `token` made of `above` and its suffixes."""
        clone = self._state(self._lengths[above] + 1)
        for values in (self._links, self._counts, self._tokens, self._targets):
            values[clone] = values[state]
        if state in self._more:
            self._more[clone] = dict(self._more[state])
        while above >= 0 and self.step(above, token) == state:
            self._connect(above, token, clone)
            above = self._links[above]
        self._links[state] = clone
        return clone

    def _count(self, state: int) -> None:
        for _ in range(_COUNTED):
            if state <= ROOT:
                return
            self._counts[state] += 1
            state = self._links[state]


@dataclass(frozen=True, slots=True)
class Spot:
    """A place for `_tree.grow`: the text's last `match` tokens end in `state`; at most `room` tokens further."""

    automaton: Automaton
    state: int
    match: int
    room: int

    def next(self, breadth: int) -> Iterable[tuple[int, float, Spot]]:
        """By count; the longer the match, the surer."""
        followers = self.automaton.followers(self.state) if self.room > 0 else []
        total = sum(count for *_, count in followers) + doubt(self.match)
        followers.sort(key=lambda follower: -follower[2])
        return [
            (token, count / total, Spot(self.automaton, after, self.match + 1, self.room - 1))
            for token, after, count in followers[:breadth]
        ]
