"""Choices: tokenised together with the text before them, and told apart by their log-probabilities.

Pure code for whoever lets a model select (the language, the program API): `join` says what to score, `choose` which
choice has won. The methods follow the documented semantics of SGLang's `choices_method`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import RequestError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")
# Log-probabilities closer than this count as equal: no more is promised of them (they may come from other passes).
TIE = 1e-4
LONG_TAIL = 1024  # characters from which a text is tokenised once and not with every choice
SEAM = 256  # characters at its end that are
CONTEXTS = (1, 2, 4)  # tokens of left context that a continued text is tokenised with: the first that stays itself

Scores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Joint:
    """A prompt, and per choice the tokens that continue it: what `GenerateCall.score` wants."""

    prompt: list[int]
    continuations: list[list[int]]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which choice has won, and per choice the number that says so: higher is better."""

    index: int
    scores: list[float]

    def drawn(self, temperature: float) -> int:
        """The winner, or above temperature 0 a choice drawn with probabilities softmax(scores / temperature)."""
        if temperature <= 0:
            return self.index
        best = max(self.scores)
        weights = [math.exp((score - best) / temperature) for score in self.scores]
        return random.choices(range(len(weights)), weights)[0]


def encode_after(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Token ids of a text that follows the tokens `before`, which stay as they are.

    With nothing before it is a text's beginning, bos and all. Else it is tokenised behind the last tokens, so that a
    vocabulary that marks beginnings does not see one here; where it would merge with them, it begins a token of its
    own.
    """
    if not before or not text:
        return tokenizer.encode(text) if not before else []
    contexts = [(tokenizer.decode(before[-n:], False), list(before[-n:])) for n in CONTEXTS]
    contexts.append(("\n", tokenizer.encode("\n", add_special=False)))
    for left, ids in contexts:
        joined = tokenizer.encode(left + text, add_special=False)
        if left and joined[: len(ids)] == ids:
            return joined[len(ids) :]
    return tokenizer.encode(text, add_special=False)


def join(tokenizer: Tokenizer, before: Sequence[int], tail: str, choices: Sequence[str]) -> Joint:
    """Tokenise every choice together with the text before it; called once per selection.

    `before` are tokens that stay as they are, `tail` is text behind them that no tokens are known of yet. Where a
    choice merges with the tail's last token it is scored as the model would see it: the prompt ends before the first
    token that is not the tail's in every joint tokenisation. It also ends one token early if there is an empty choice,
    which is then as likely as the token before it. Raises RequestError without choices, or without a token before them.
    """
    if not choices:
        raise RequestError("choices is empty", hint="give at least one", param="choices")
    head, rest = seam(tokenizer, before, tail)
    start = [*before, *head]
    texts = [start + encode_after(tokenizer, start, rest + text) for text in ("", *choices)]
    same = 0
    for column in zip(*texts, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    same = min(same, min(map(len, texts[1:])) - 1)
    if same < 1:
        raise RequestError("no token comes before the choices", hint="append some text first", param="choices")
    return Joint(texts[0][:same], [text[same:] for text in texts[1:]])


def seam(tokenizer: Tokenizer, before: Sequence[int], tail: str) -> tuple[list[int], str]:
    """The tokens of a long tail's beginning, which no choice can change, and the rest of its text."""
    cut = max(tail.rfind(" ", 0, -SEAM), tail.rfind("\n", 0, -SEAM))
    if len(tail) < LONG_TAIL or cut < 1:
        return [], tail
    head = encode_after(tokenizer, before, tail[:cut])
    whole = encode_after(tokenizer, before, tail)
    agree = head + encode_after(tokenizer, [*before, *head], tail[cut:]) == whole
    return (head, tail[cut:]) if agree else ([], tail)


@dataclass(slots=True)
class Bare:
    """One scoring call of choices without their prompt: what follows their first token."""

    prompt: list[int]
    score: list[list[int]] = field(default_factory=list)
    members: list[int] = field(default_factory=list)  # whose choices these are


def bare_calls(continuations: Sequence[Sequence[int]]) -> list[Bare]:
    """The calls that `unconditional_likelihood_normalized` needs beside the selection's own; may be none.

    Choices that start with the same token go into one call.
    """
    calls: dict[int, Bare] = {}
    for index, tokens in enumerate(continuations):
        if len(tokens) > 1:
            call = calls.setdefault(tokens[0], Bare([tokens[0]]))
            call.score.append(list(tokens[1:]))
            call.members.append(index)
    return list(calls.values())


def unconditional(
    continuations: Sequence[Sequence[int]], calls: Sequence[Bare], results: Sequence[Scores]
) -> list[list[float]]:
    """Per choice and token the log-probability without the prompt; a first token, which nothing precedes, counts 0."""
    scores = [[0.0] for _ in continuations]
    for call, result in zip(calls, results, strict=True):
        for index, rest in zip(call.members, result, strict=True):
            scores[index] += rest
    return scores


def choose(method: str, scores: Scores, bare: Scores | None = None) -> Choice:
    """The winning choice; the first of equals. `scores[i][j]` is the log-probability of choice i's token j.

    - token_length_normalized: the highest mean.
    - greedy_token_selection: token by token, only the choices with the highest log-probability go on. A choice that
      has ended while others go on is extended by its own mean.
    - unconditional_likelihood_normalized: the highest mean of the differences to `bare`, see `unconditional`.

    Raises RequestError for another method.
    """
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise RequestError(f"unknown method {method!r}", hint=f"one of {known}", param="method")
    if method == METHODS[2]:
        assert bare is not None, "this method needs what the choices score without their prompt"
        scores = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(scores, bare, strict=True)]
    means = [sum(row) / len(row) for row in scores]
    if method == METHODS[1]:
        return Choice(_greedy(scores, means), means)
    return Choice(max(range(len(means)), key=means.__getitem__), means)


def _greedy(scores: Scores, means: Sequence[float]) -> int:
    left = list(range(len(scores)))
    for place in range(max(map(len, scores))):
        here = {i: scores[i][place] if place < len(scores[i]) else means[i] for i in left}
        best = max(here.values())
        left = [i for i in left if here[i] >= best - TIE]
        if len(left) == 1:
            break
    return left[0]
