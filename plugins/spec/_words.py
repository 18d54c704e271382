"""A vocabulary as bytes: how the model would cut a text after what is written, and where a cut may still change."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from phloem.model_spec import ModelSpec
from phloem.tokenizer import Tokenizer

Row = npt.NDArray[np.uint32]
_REMEMBERED = 4096  # texts whose cuts are kept


class Words:
    """The tokens of a model that stand for text. Made once; a look-up that was asked before costs a microsecond."""

    def __init__(self, tokenizer: Tokenizer, model: ModelSpec) -> None:
        """Takes 0.1 s for 50,000 tokens."""
        self.ends = frozenset(model.eos_token_ids)
        barred, size = tokenizer.special_ids | self.ends, model.vocab_size
        self.bytes = [b"" if token in barred else tokenizer.token_bytes(token) for token in range(size)]
        self._ids = {text: token for token, text in reversed(list(enumerate(self.bytes))) if text}
        self._sorted = sorted(self._ids)
        self._lengths = np.zeros(-(-size // 32) * 32, dtype=np.int64)
        self._lengths[:size] = [len(text) for text in self.bytes]
        self._longest = int(self._lengths.max())
        self.valid: Row = np.packbits(np.arange(len(self._lengths)) < size, bitorder="little").view(np.uint32)
        self._tokenizer = tokenizer
        self.cut = lru_cache(_REMEMBERED)(self._cut)
        self.open_starts = lru_cache(_REMEMBERED)(self._open_starts)
        self.longer = lru_cache(self._longest + 1)(self._longer)

    def _cut(self, before: tuple[int, ...], text: bytes) -> tuple[int, ...]:
        """Tokens that spell `text` after the tokens `before`, as the tokenizer cuts both together.

        By longest match where there is no such cut: the tokenizer would join the end of `before` with the text, or
        normalises it to other bytes, or the text begins inside a character. Of a character that ends after the text
        nothing is spelled, unless the text has no other.
        """
        head = b""
        for token in before:
            head = head + self.bytes[token] if self.bytes[token] else b""  # the tokenizer never joins special tokens
        while head and 0x80 <= head[0] < 0xC0:
            head = head[1:]
        whole = _whole(text)
        try:
            ids = self._tokenizer.encode((head + whole).decode(), add_special=False)
        except UnicodeDecodeError:
            return self.longest_match(text)
        first, left = len(ids), len(whole)
        while first and left > 0:
            first -= 1
            left -= len(self.bytes[ids[first]])
        tokens = tuple(ids[first:])
        exact = bool(whole) and b"".join(self.bytes[token] for token in tokens) == whole
        return tokens if exact else self.longest_match(text)

    def useful(self, text: bytes, tokens: int) -> bytes:
        """The beginning of a text that decides its first `tokens` tokens: all of it, unless it is much longer.

        It ends before a space, where cuts seldom depend on what follows, else at a character; one token more fits in.
        """
        most = (tokens + 1) * self._longest
        if len(text) <= most + self._longest:
            return text
        space = text.find(b" ", most, most + self._longest)
        if space >= 0:
            return text[:space]
        while 0x80 <= text[most] < 0xC0 and most:
            most -= 1
        return text[:most]

    def longest_match(self, text: bytes) -> tuple[int, ...]:
        """The longest token that fits, again and again; stops where none does."""
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[text[at:end]])
            at = end
        return tuple(tokens)

    def _open_starts(self, text: bytes) -> tuple[int, ...]:
        """Places in `text` from which some token of the vocabulary follows it to its end and runs past it."""
        places = range(max(0, len(text) - self._longest + 1), len(text))
        return tuple(place for place in places if self._is_beginning(text[place:]))

    def _is_beginning(self, text: bytes) -> bool:
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def _longer(self, length: int) -> Row:
        """Bitmask [ceil(vocab / 32)] uint32 of the tokens with more bytes than `length`."""
        return np.packbits(self._lengths > length, bitorder="little").view(np.uint32)


def _whole(text: bytes) -> bytes:
    """Without the character at the end of which only the first bytes are there."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return text[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else text
        if byte < 0x80:
            break
    return text
