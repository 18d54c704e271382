"""What a drafter remembers: which token followed at a place, so that it is proposed where the place comes again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[int, ...]
_CERTAIN = 3  # votes; so many other answers make an old one forgotten


class Memory:
    """The usual answer to each question, at most `limit` of them; the ones not asked for longest are forgotten.

    By majority vote in constant space (Boyer and Moore, 1981): one draw that differs does not replace a habit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # token, votes

    def __len__(self) -> int:
        return len(self._answers)

    def recall(self, key: Key) -> int | None:
        """The token that usually followed."""
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key][0]

    def learn(self, key: Key, token: int) -> None:
        """`token` followed."""
        known, votes = self._answers.get(key, (token, 0))
        if known == token:
            self._answers[key] = token, min(votes + 1, _CERTAIN)
        elif votes > 1:
            self._answers[key] = known, votes - 1
        else:
            self._answers[key] = token, 1
        if len(self._answers) > self._limit:
            self._answers.popitem(last=False)


class Question(NamedTuple):
    """Which token follows the first `after` tokens of a proposal."""

    after: int
    memory: Memory
    key: Key


@dataclass(slots=True)
class Proposal:
    """The last proposal of a request, until the text that came of it is seen."""

    length: int = 0  # of the text before it
    tokens: list[int] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def learn(self, text: array[int]) -> None:
        """Answer the questions that `text`, which has grown since, has come to. Called once, before the next one."""
        came = text[self.length : self.length + len(self.tokens) + 1].tolist()
        followed = next(
            (i for i, (ours, true) in enumerate(zip(self.tokens, came, strict=False)) if ours != true), None
        )
        reached = len(came) - 1 if followed is None else followed
        for question in self.questions:
            if question.after <= reached:
                question.memory.learn(question.key, came[question.after])
        self.questions = []
