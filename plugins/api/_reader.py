"""Reads one answer while it grows: thoughts, content, calls. Parsers do the work, this joins them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from phloem.interfaces import ParserStream, Piece


class Hidden:
    """The special tokens that a text leaves out, where a parser needs to see them but the caller does not."""

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts`: their spellings, at least one."""
        known = sorted(filter(None, texts), key=len, reverse=True)
        self._all = re.compile("|".join(map(re.escape, known)))
        self._beginnings = {text[:length] for text in known for length in range(1, len(text))}
        self._longest = len(known[0]) if known else 0
        self._known = frozenset(known)

    def __contains__(self, text: str) -> bool:
        return text in self._known

    def split(self, text: str) -> tuple[str, str]:
        """The text without special tokens, and its end, which may become one."""
        start = 0
        for match in self._all.finditer(text):
            if match.end() == len(text) and match[0] in self._beginnings:
                break
            start = match.end()
        first = max(start, len(text) - self._longest + 1)
        cut = next((place for place in range(first, len(text)) if text[place:] in self._beginnings), len(text))
        return self.without(text[:cut]), text[cut:]

    def without(self, text: str) -> str:
        """The text without special tokens, when nothing follows."""
        return self._all.sub("", text)


class Reader:
    """One answer. What it returns, joined by kind and call, does not depend on how the text was cut."""

    def __init__(
        self, thoughts: ParserStream | None, calls: ParserStream | None, hidden: Hidden | None, *, reasoning: bool
    ) -> None:
        """`thoughts` reads first, `calls` the content it leaves; `reasoning` False drops the thoughts."""
        self._thoughts, self._calls, self._hidden, self._reasoning = thoughts, calls, hidden, reasoning
        self._held = {"content": "", "reasoning": ""}

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now, none of them empty but arguments."""
        pieces = [Piece("content", text)] if self._thoughts is None else self._thoughts.push(text)
        return self._shown(self._called(pieces))

    def finish(self) -> list[Piece]:
        """The rest."""
        pieces = self._called(self._thoughts.finish() if self._thoughts is not None else [])
        if self._calls is not None:
            pieces += self._calls.finish()
        shown = self._shown(pieces)
        if self._hidden is not None:
            rest = {kind: self._hidden.without(text) for kind, text in self._held.items()}
            shown += [Piece(kind, text) for kind, text in rest.items() if text]
        return shown

    def _called(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Content is searched for calls, the rest is passed on."""
        if self._calls is None:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.push(piece.text) if piece.kind == "content" else [piece]
        return found

    def _shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Without what the caller does not see."""
        found = []
        for piece in pieces:
            if piece.kind in self._held:
                if piece.kind == "reasoning" and not self._reasoning:
                    continue
                text = piece.text
                if self._hidden is not None:
                    text, self._held[piece.kind] = self._hidden.split(self._held[piece.kind] + text)
                if text:
                    found.append(Piece(piece.kind, text))
            else:
                found.append(piece)
        return found
