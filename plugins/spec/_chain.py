"""A proposal under construction: forced text, tokens that alone are allowed, and one guess on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phloem.interfaces import Matcher

from ._memory import Memory, Question
from ._words import Row, Words

CONTEXT = 4  # tokens before a forced text that it is cut with: looking back further changes no cut (llguidance)
_FEW = 40  # allowed tokens up to which they are a choice that the grammar offers, not free text
_CHOICE, _FREE = 4, 3  # tokens before a choice that tell its place, and before one in free text


class Chain:
    """A path of tokens. The matcher goes along with it; `release` takes it back to where it stood."""

    def __init__(self, matcher: Matcher, words: Words, before: Sequence[int], room: int, *, canonical: bool) -> None:
        """`before`: at least the last CONTEXT tokens of the text, as far as there are any."""
        self.tokens: list[int] = []
        self.questions: list[Question] = []
        self.forced = 0  # tokens at the start that are certain, or cut as the tokenizer cuts them: with `canonical`
        self._matcher, self._words, self._canonical = matcher, words, canonical
        self._text = list(before)
        self._room = room

    def grow(self, shared: Memory, own: Memory) -> None:
        """Add tokens while the grammar forces any. `shared` is the memory of choices, `own` that of free text."""
        guessed = False
        while len(self.tokens) < self._room:
            text = self._matcher.forced()
            if text:
                if not self._spell(text, shared):
                    return
                continue
            allowed = self._allowed()
            few = int(np.bitwise_count(allowed).sum())
            if few == 1:
                if not self._push(_only(allowed), sure=True):
                    return
            elif guessed or not self._guess(*((shared, _CHOICE) if few <= _FEW else (own, _FREE))):
                return
            else:
                guessed = True

    def release(self) -> None:
        """Called once, whatever happened."""
        if self.tokens:
            self._matcher.rollback(len(self.tokens))

    def _spell(self, text: bytes, memory: Memory) -> bool:
        """Add the tokens of a forced text, up to the first that usually is another one; False where it ends."""
        begin = self._words.useful(text, self._room - len(self.tokens))
        cut = self._words.cut(tuple(self._text[-CONTEXT:]), begin)
        held = (
            self._held(cut, text) if len(begin) == len(text) else len(cut)
        )  # there is no room for what lies at its end
        text = begin
        for i, token in enumerate(cut):
            key = (self._text[-1], token)
            usual = token
            if i >= held or not self._canonical:
                known = self._ask(memory, key)
                if known is None and i >= held:
                    return False
                usual = token if known is None else known
            piece = self._words.bytes[usual]
            fits = bool(piece) and (text.startswith(piece) or piece.startswith(text))
            if not (fits and self._push(usual, sure=usual == token and i < held)):
                if usual == token or i >= held or not self._push(token, sure=True):
                    return False
                usual = token
            if usual != token:
                return True  # what is left is cut anew
            text = text[len(self._words.bytes[token]) :]
        return bool(cut)

    def _held(self, cut: Sequence[int], text: bytes) -> int:
        """The first token of `cut` to hold back: from inside it on, a token that runs past the text is allowed.

        So `order` is held back where `orderId` and `orderName` may follow (llguidance's rule). As the cut of a text
        goes, so do all tokens behind.
        """
        at, token, end = 0, 0, 0  # bytes and tokens that the matcher has gone along, and where the next token ends
        try:
            for place in self._words.open_starts(text):
                while token < len(cut) and (end := at + len(self._words.bytes[cut[token]])) <= place:
                    if not self._matcher.accept(cut[token]):
                        return token
                    at, token = end, token + 1
                if token == len(cut):
                    break
                if self._runs_past(text[at:place], len(text) - place):
                    return token
            return len(cut)
        finally:
            if token:
                self._matcher.rollback(token)

    def _runs_past(self, start: bytes, length: int) -> bool:
        """Whether behind the bytes `start` a token of more than `length` bytes is allowed."""
        taken = 0
        try:
            for token in self._words.longest_match(start):
                if not self._matcher.accept(token):
                    return False
                taken += 1
            return bool((self._allowed() & self._words.longer(length)).any())
        finally:
            if taken:
                self._matcher.rollback(taken)

    def _guess(self, memory: Memory, context: int) -> bool:
        """Add the token that followed here before, if forced text follows it: else it would gain nothing."""
        usual = self._ask(memory, tuple(self._text[-context:]))
        if usual is None or not self._push(usual):
            return False
        if self._matcher.forced():
            return True
        self._matcher.rollback(1)
        self.tokens.pop()
        return False

    def _ask(self, memory: Memory, key: tuple[int, ...]) -> int | None:
        """What usually follows; when it is seen what does, the memory learns it."""
        self.questions.append(Question(len(self.tokens), memory, key))
        return memory.recall(key)

    def _push(self, token: int, *, sure: bool = False) -> bool:
        """Go one token further, if there is room, the token is no end, and the grammar allows it."""
        if len(self.tokens) >= self._room or token in self._words.ends or not self._matcher.accept(token):
            return False
        self.forced += self._canonical and sure and self.forced == len(self.tokens)
        self.tokens.append(token)
        self._text.append(token)
        return True

    def _allowed(self) -> Row:
        """The mask here, [ceil(vocab / 32)] uint32; bits behind the vocabulary are clear."""
        row = np.empty(len(self._words.valid), dtype=np.int32)
        self._matcher.fill(row)
        return row.view(np.uint32) & self._words.valid


def _only(allowed: Row) -> int:
    """The one token of a mask."""
    word = int(np.flatnonzero(allowed)[0])
    return word * 32 + int(allowed[word]).bit_length() - 1
