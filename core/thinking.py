"""Thoughts before a constrained answer: a matcher over any backend's matcher, or over none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .interfaces import Matcher
from .model_spec import ModelSpec
from .params import SamplingParams
from .tokenizer import Tokenizer

Row = npt.NDArray[np.int32]
_TAIL_TOKENS = 32  # of a prompt, in which a template opens or closes a thought
_SPACES = 4  # tokens of white space that may come before a thought
_KEPT_AUTOMATA = 64


class Thinking:
    """What thoughts of one vocabulary share: the bytes of its tokens, and an automaton per pair of markers."""

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._automata: dict[tuple[str | None, str], Automaton] = {}

    def automaton(self, start: str | None, end: str) -> Automaton:
        """The automaton of a pair of markers; those used last are kept."""
        made = self._automata.pop((start, end), None) or Automaton(self, (start or "").encode(), end.encode())
        self._automata[start, end] = made
        if len(self._automata) > _KEPT_AUTOMATA:
            del self._automata[next(iter(self._automata))]
        return made

    @cached_property
    def texts(self) -> list[bytes]:
        """The bytes of each token; empty for those that may not stand in a thought."""
        ends = frozenset(self._model.eos_token_ids)
        tokens = range(self._model.vocab_size)
        return [b"" if token in ends else self._tokenizer.token_bytes(token) for token in tokens]

    @cached_property
    def ids(self) -> dict[bytes, list[int]]:
        """Tokens by their bytes."""
        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.texts):
            if text:
                ids.setdefault(text, []).append(token)
        return ids

    def mask(self, tokens: Sequence[int]) -> Row:
        """A bitmask [ceil(vocab / 32)] int32 of tokens."""
        bits = np.zeros(-(-self._model.vocab_size // 32) * 32, dtype=np.bool_)
        bits[list(tokens)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


class Automaton:
    """Follows the bytes of a thought: recognises its end wherever tokens are cut (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, shared: Thinking, start: bytes, end: bytes) -> None:
        self.shared, self.start, self.end = shared, start.strip(), end
        self._fail = [0] * (len(end) + 1)
        for i in range(1, len(end)):
            k = self._fail[i]
            while k and end[k] != end[i]:
                k = self._fail[k]
            self._fail[i + 1] = k + (end[k] == end[i])
        self._free: dict[int, Row] = {}
        self._opening: Row | None = None
        self._prefixes: dict[bytes, Row] = {}

    def advance(self, at: int, text: bytes) -> int | None:
        """Bytes of the end matched after `text`, `at` before it; None if the text runs over the end."""
        for place, byte in enumerate(text):
            while at and self.end[at] != byte:
                at = self._fail[at]
            at += self.end[at] == byte
            if at == len(self.end):
                return at if place == len(text) - 1 else None
        return at

    def free(self, at: int) -> Row:
        """Inside a thought: all tokens but those that end the text or run over the thought's end."""
        if at not in self._free:
            last, texts = self.end[-1:], self.shared.texts
            over = {t for t, text in enumerate(texts) if last in text[:-1] and self.advance(at, text) is None}
            self._free[at] = self.shared.mask([t for t, text in enumerate(texts) if text and t not in over])
        return self._free[at]

    def beginning(self, text: bytes) -> Row:
        """Tokens whose bytes are a beginning of `text`."""
        if text not in self._prefixes:
            found = (self.shared.ids.get(text[:n], ()) for n in range(1, len(text) + 1))
            self._prefixes[text] = self.shared.mask([token for tokens in found for token in tokens])
        return self._prefixes[text]

    def opens(self, state: _State, text: bytes) -> int | None:
        """Bytes of the start matched after `text`, white space before it left out; None if no thought opens so."""
        if not text:
            return None
        if state.at == 0 and state.thought < _SPACES:
            text = text.lstrip()
        return state.at + len(text) if self.start[state.at :].startswith(text) else None

    def opening(self, state: _State) -> Row:
        """Tokens with which a thought may open."""
        if state.at or state.thought >= _SPACES:
            return self.beginning(self.start[state.at :])
        if self._opening is None:
            texts = enumerate(self.shared.texts)
            self._opening = self.shared.mask([token for token, text in texts if self.opens(state, text) is not None])
        return self._opening


class _State(NamedTuple):
    phase: str  # "start": the thought may open, or the answer begin; "inside"; "answer"
    at: int = 0  # bytes matched of the marker awaited; all of the start's where no thought can open any more
    thought: int = 0  # tokens of the thought; before it, of white space
    taken: int = 0  # tokens the answer's matcher has accepted
    direct: int = 0  # tokens accepted by the matcher of an answer without a thought
    alive: bool = True  # that matcher accepted everything so far


class Thought:
    """Matcher: an optional thought, then `body`. `automaton` knows the markers. Cheap to fork and to roll back."""

    def __init__(
        self, automaton: Automaton, body: Matcher | None, direct: Matcher | None, budget: int | None, first: _State
    ) -> None:
        self._automaton, self._body, self._direct, self._budget = automaton, body, direct, budget
        self._states = [first]

    @classmethod
    def begin(
        cls, automaton: Automaton, body: Matcher | None, params: SamplingParams, prompt: Sequence[int]
    ) -> Thought:
        """At the output's start; the prompt's end says whether a template has opened or closed the thought."""
        texts = automaton.shared.texts
        tail = b"".join(texts[token] for token in prompt[-_TAIL_TOKENS:]).rstrip()
        if tail.endswith(automaton.end.strip()):
            phase = "answer"
        else:
            phase = "inside" if tail.endswith(automaton.start) else "start"  # all texts end with nothing
        direct = body.fork() if body is not None and phase == "start" else None
        return cls(automaton, body, direct, params.think_tokens, _State(phase))

    def fill(self, row: Row) -> None:
        """In a thought all tokens, or its end where the budget is spent; then as the body says."""
        state = self._states[-1]
        if state.phase == "answer":
            self._fill_by(self._body, row)
        elif state.phase == "inside" and self._spent(state):
            row[:] = self._automaton.beginning(self._rest(state))
        elif state.phase == "inside":
            row[:] = self._automaton.free(state.at)
        else:
            row[:] = 0
            if state.alive:
                self._fill_by(self._direct, row)
            row |= self._automaton.opening(state)

    def accept(self, token: int) -> bool:
        """As `fill` allows."""
        state = self._states[-1]
        follow = {"answer": self._answer, "inside": self._inside, "start": self._start}[state.phase]
        after = follow(state, token)
        if after is None:
            return False
        self._states.append(after)
        return True

    def rollback(self, tokens: int) -> None:
        """Back before the last `tokens` accepted tokens."""
        now, then = self._states[-1], self._states[-1 - tokens]
        if self._body is not None and now.taken > then.taken:
            self._body.rollback(now.taken - then.taken)
        if self._direct is not None and now.direct > then.direct:
            self._direct.rollback(now.direct - then.direct)
        del self._states[len(self._states) - tokens :]

    def is_complete(self) -> bool:
        """The answer is complete."""
        state = self._states[-1]
        if state.phase == "start":
            decided = state.at == len(self._automaton.start)
            return decided and self._direct is not None and self._direct.is_complete()
        return state.phase == "answer" and self._body is not None and self._body.is_complete()

    def forced(self) -> bytes:
        """The end of a thought whose budget is spent, the rest of its start; in the answer what the body forces."""
        state = self._states[-1]
        if state.phase == "inside":
            return self._rest(state) if self._spent(state) else b""
        if state.phase == "start" and not state.alive and state.at:
            return self._automaton.start[state.at :]
        if state.phase == "start" and state.at < len(self._automaton.start):
            return b""  # undecided
        matcher = self._body if state.phase == "answer" else self._direct
        return matcher.forced() if matcher is not None else b""

    def fork(self) -> Thought:
        """An independent copy."""
        body, direct = (one.fork() if one is not None else None for one in (self._body, self._direct))
        twin = Thought(self._automaton, body, direct, self._budget, self._states[0])
        twin._states = list(self._states)
        return twin

    def _spent(self, state: _State) -> bool:
        return self._budget is not None and state.thought >= self._budget

    def _rest(self, state: _State) -> bytes:
        return self._automaton.end[state.at :]

    @staticmethod
    def _fill_by(matcher: Matcher | None, row: Row) -> None:
        if matcher is None:
            row[:] = -1
        else:
            matcher.fill(row)

    def _answer(self, state: _State, token: int) -> _State | None:
        if self._body is None:
            return state
        return state._replace(taken=state.taken + 1) if self._body.accept(token) else None

    def _inside(self, state: _State, token: int) -> _State | None:
        text = self._automaton.shared.texts[token]
        at = self._automaton.advance(state.at, text) if text else None
        if at is None or (self._spent(state) and not self._rest(state).startswith(text)):
            return None
        if at == len(self._automaton.end):
            return state._replace(phase="answer", at=0)
        return state._replace(at=at, thought=state.thought + 1)

    def _start(self, state: _State, token: int) -> _State | None:
        automaton = self._automaton
        at = automaton.opens(state, automaton.shared.texts[token])
        takes = state.alive and (self._direct is None or self._direct.accept(token))
        if at is None and not takes:
            return None
        after = state._replace(direct=state.direct + (takes and self._direct is not None), alive=takes)
        if at is None:
            return after._replace(at=len(automaton.start))
        if at == len(automaton.start):
            return after._replace(phase="inside", at=0, thought=0)
        return after._replace(at=at, thought=state.thought + (at == 0))
