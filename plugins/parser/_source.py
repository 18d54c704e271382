"""Text that comes in parts, and the few ways in which a parser reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]  # a reader: suspends where it needs text that has not come, returns what it found
Write = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_UNITS = re.compile(r"\s+|\S+")


def after(lead: str, write: Write) -> Write:
    """A `write` whose first text gets `lead` before it."""
    pending = [lead]

    def first(text: str) -> None:
        if text:
            write(pending.pop() + text if pending else text)

    return first


class Markers:
    """Texts to look for, none of them part of another: then the first to begin is also the first to be complete."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._begun = {text[:size] for text in self.texts for size in range(1, len(text))}
        self._longest = max(map(len, self._begun), default=0)

    def begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a marker."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._begun:
                return size
        return 0


class Source:
    """An answer as far as it has come. Readers decide by characters, never by where one part ends and the next begins.

    So how the text was cut cannot change what is read: the property that every parser here owes to this class. Each
    character is looked at a bounded number of times, and what was read is dropped, so that reading is linear.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None  # where keeping began; what was kept of earlier parts is in `_earlier`
        self._earlier: list[str] = []
        self.closed = False

    def add(self, text: str) -> None:
        """The next part."""
        if self._mark is not None:
            self._earlier.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """There are no more parts."""
        self.closed = True

    # --- keeping what is read, to read it once more

    def keep(self) -> None:
        """From here on remember what is read."""
        self._mark, self._earlier = self._at, []

    def kept(self) -> str:
        """What was read since `keep`."""
        return "" if self._mark is None else "".join(self._earlier) + self._text[self._mark : self._at]

    def forget(self) -> str:
        """What was read since `keep`, which is not remembered any more."""
        text, self._mark, self._earlier = self.kept(), None, []
        return text

    def rewind(self) -> int:
        """Back to where `keep` was called, which still holds; returns how many characters that is."""
        assert self._mark is not None
        size = len(self.kept())
        if self._earlier:
            self._text, self._at, self._mark = self.kept() + self._text[self._at :], 0, 0
            self._earlier = []
        else:
            self._at = self._mark
        return size

    # --- reading

    def take(self, size: int) -> str:
        """The next `size` characters, which are known to be there."""
        text = self._text[self._at : self._at + size]
        self._at += size
        return text

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> str:
        """What matches of the text that is there, perhaps nothing; more of it may come. At most `most` characters."""
        end = len(self._text) if most is None else self._at + most
        match = pattern.match(self._text, self._at, end)
        return self.take(match.end() - self._at) if match else ""

    def peek(self) -> Step[str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if self.closed:
                return ""
            yield
        return self._text[self._at]

    def window(self, size: int) -> Step[str]:
        """The next `size` characters, fewer at the end."""
        while len(self._text) - self._at < size and not self.closed:
            yield
        return self._text[self._at : self._at + size]

    def ahead(self, text: str) -> Step[bool]:
        """Does `text` follow? Waits no longer than it may."""
        while True:
            have = self._text[self._at : self._at + len(text)]
            if have == text or self.closed or not text.startswith(have):
                return have == text
            yield

    def try_take(self, text: str) -> Step[bool]:
        """Read `text` if it follows."""
        follows = yield from self.ahead(text)
        if follows:
            self.take(len(text))
        return follows

    def spaces(self) -> Step[str]:
        """White space, perhaps none."""
        found: list[str] = []
        while (yield from self.peek()).isspace():
            found.append(self.run(_SPACE))
        return "".join(found)

    def literal(self, text: str) -> Step[bool]:
        """Read `text`, where white space stands for any, and none; False at the first word that is not there."""
        for unit in _UNITS.findall(text):
            yield from self.spaces()
            if unit.strip() and not (yield from self.try_take(unit)):
                return False
        return True

    def word(self, pattern: re.Pattern[str], limit: int) -> Step[str]:
        """The longest text of characters that `pattern` (of one character) matches; "" if it has more than `limit`."""
        found: list[str] = []
        while (char := (yield from self.peek())) and pattern.match(char) and len(found) <= limit:
            found.append(self.take(1))
        return "".join(found) if len(found) <= limit else ""

    def until(self, markers: Markers, write: Write) -> Step[str]:
        """Pass on the text before the first marker as soon as it is certain; returns the marker, not read, or ""."""
        while True:
            match = markers.pattern.search(self._text, self._at)
            if match is not None:
                self._pass(match.start(), write)
                return match[0]
            rest = len(self._text)
            self._pass(rest if self.closed else rest - markers.begun(self._text[self._at :]), write)
            if self.closed:
                return ""
            yield

    def _pass(self, end: int, write: Write) -> None:
        if end > self._at:
            write(self.take(end - self._at))
