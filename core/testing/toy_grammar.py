"""A small, real grammar: `regex` and `choices` by partial matching. For tests, and as an example of the kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import regex
from pydantic import BaseModel, ConfigDict

from ..constraint import Constraint, Unenforced
from ..errors import RequestError
from ..interfaces import PluginContext

_FORCED_CHARS = 64  # `forced` looks no further


class ToyMatcher:
    """Allows the tokens whose text keeps the output a beginning of some full match of a pattern.

    An end token is allowed where the output matches; nothing may follow it but itself, which changes nothing there.
    """

    def __init__(self, pattern: str, texts: Sequence[str], ends: Iterable[int]) -> None:
        """`texts[t]` is the text of token t; a token without text is never allowed, except an end token."""
        self._pattern = regex.compile(pattern)
        self._texts = texts
        self._letters = sorted({letter for text in texts for letter in text})
        self._ends = frozenset(ends)
        self._states = [""]  # text after each accepted token; the last is the current one
        self._ended: list[bool] = [False]
        self._masks: dict[str, npt.NDArray[np.int32]] = {}  # shared by forks, like the letters that may follow a state
        self._following: dict[str, frozenset[str]] = {}

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """One look at every token of the vocabulary, remembered per state."""
        state = self._states[-1]
        if state not in self._masks:
            self._next(state)  # one match per letter rules out most tokens
            allowed = np.array([self._allows(token) for token in range(len(self._texts))], dtype=np.bool_)
            allowed = np.pad(allowed, (0, -len(allowed) % 32))
            self._masks[state] = np.packbits(allowed, bitorder="little").view(np.int32)
        row[:] = 0
        row[: len(self._masks[state])] = self._masks[state]
        if self._ended[-1]:
            row[:] = 0
            for end in self._ends:
                row[end // 32] |= np.array(1 << end % 32, dtype=np.uint32).view(np.int32)

    def accept(self, token: int) -> bool:
        """As `fill` allows."""
        if token in self._ends:
            if not self._allows(token):
                return False
            self._push(self._states[-1], True)
            return True
        if self._ended[-1] or not self._allows(token):
            return False
        self._push(self._states[-1] + self._texts[token], False)
        return True

    def rollback(self, tokens: int) -> None:
        """Back to the state before the last `tokens` accepted tokens, end tokens included."""
        if tokens >= len(self._states):
            raise ValueError(f"cannot take back {tokens} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - tokens :], self._ended[len(self._ended) - tokens :]

    def is_complete(self) -> bool:
        """The output matches and no token but an end token may follow."""
        if self._ended[-1]:
            return True
        texts = (token for token in range(len(self._texts)) if token not in self._ends)
        return self._matches() and not any(self._allows(token) for token in texts)

    def forced(self) -> bytes:
        """Character by character, while one character of the vocabulary may follow and the output must go on."""
        state = self._states[-1]
        while not self._ended[-1] and len(state) - len(self._states[-1]) < _FORCED_CHARS:
            letters = self._next(state)
            if len(letters) != 1 or self._pattern.fullmatch(state):
                break
            state += min(letters)
        return state[len(self._states[-1]) :].encode()

    def fork(self) -> ToyMatcher:
        """Shares the pattern and the remembered masks, which do not change."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._states, twin._ended = list(self._states), list(self._ended)
        return twin

    def _push(self, state: str, ended: bool) -> None:
        self._states.append(state)
        self._ended.append(ended)

    def _matches(self) -> bool:
        return self._pattern.fullmatch(self._states[-1]) is not None

    def _allows(self, token: int) -> bool:
        if token in self._ends:
            return self._matches()
        if not 0 <= token < len(self._texts) or not self._texts[token]:
            return False
        state, text = self._states[-1], self._texts[token]
        if state in self._following and text[0] not in self._following[state]:
            return False
        return self._pattern.fullmatch(state + text, partial=True) is not None

    def _next(self, state: str) -> frozenset[str]:
        """Letters of the vocabulary that keep a text the beginning of a full match."""
        if state not in self._following:
            letters = (c for c in self._letters if self._pattern.fullmatch(state + c, partial=True))
            self._following[state] = frozenset(letters)
        return self._following[state]


class ToyGrammar:
    """Kind `grammar` for toy vocabularies: a mask costs one partial match per letter, and per token that may begin."""

    api = 1
    capabilities = frozenset({"regex", "choices"})

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        assert context.tokenizer is not None, "a grammar needs the tokenizer"
        assert context.model is not None, "a grammar needs the model's vocabulary size and end tokens"
        self._ends = context.model.eos_token_ids
        size = min(context.model.vocab_size, context.tokenizer.vocab_size)
        self._texts = [context.tokenizer.token_text(token) for token in range(size)]
        for token, text in enumerate(self._texts):
            if "\ufffd" in text or token in context.tokenizer.special_ids:  # a part of a character; or no text at all
                self._texts[token] = ""

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """What is compiled is enforced."""
        return []

    def compile(self, constraint: Constraint) -> bytes:
        """The pattern, once it is known to be one. Raises RequestError for anything but `regex` and `choices`."""
        if constraint.kind not in self.capabilities:
            problem = f"{constraint.kind} cannot be enforced by the toy grammar"
            raise RequestError(problem, hint="use regex", param=constraint.kind)
        if constraint.kind == "choices":
            return "|".join(map(regex.escape, json.loads(constraint.value))).encode()
        try:
            regex.compile(constraint.value)
        except regex.error as error:
            raise RequestError(f"regex is not valid: {error}", param="regex") from error
        return constraint.value.encode()

    def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
        """A matcher of the pattern."""
        return ToyMatcher(compiled.decode(), self._texts, self._ends)
