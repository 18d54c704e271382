"""Regular expressions with Python's meaning, written in the syntax of Rust's `regex` crate (which llguidance reads)."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from phloem.errors import RequestError

from ._width import check

MAX_NESTING = 100  # of groups; the library's own limit is 250
# What Python's classes hold: `str.isalnum` is letters and numbers, without the marks that Rust's \w has; `str.isspace`
# has the four separators U+001C to U+001F besides.
_CLASSES = {
    "d": r"\p{Nd}",
    "D": r"\P{Nd}",
    "w": r"[\p{L}\p{N}_]",
    "W": r"[^\p{L}\p{N}_]",
    "s": r"[\s\u{1c}-\u{1f}]",
    "S": r"[^\s\u{1c}-\u{1f}]",
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "b": "\b"}
_REFUSED_GROUPS = {
    "(?=": "a lookahead",
    "(?!": "a lookahead",
    "(?<=": "a lookbehind",
    "(?<!": "a lookbehind",
    "(?>": "an atomic group",
    "(?(": "a condition on a group",
    "(?P=": "a backreference",
}
_ANCHORS = (("^", True), (r"\A", True), ("$", False), (r"\Z", False))  # spelling, and whether it is one of the start
_GROUP = re.compile(r"\(\?(?:P<\w+>|([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])|#[^)]*\))")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_NUMBER = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(0[0-7]{0,2}|[1-3][0-7]{2})|N\{([^}]+)\}")


class Translation(NamedTuple):
    """A pattern in Rust's syntax, and (for Python's `re`) one that matches each character that a match may hold."""

    rust: str
    alphabet: str


class _Part(NamedTuple):
    """A piece in Rust's syntax, and the indices of anchors in it: nothing may lie before, or behind, them."""

    rust: str
    start: int | None = None
    end: int | None = None


def translate(pattern: str, param: str, where: str = "") -> Translation:
    """The language of `re.fullmatch(pattern, text)`. Called once per pattern, when a grammar is compiled.

    Raises RequestError(param=param) with the position for what is no pattern, a huge one, or none that a finite
    automaton can follow. `where` comes before the message: the place of the pattern in what was given.
    """
    check(pattern, param, where)
    reader = _Reader(pattern, param, where)
    rust = reader.alternatives().rust
    return Translation(f"(?{reader.flags}:{rust})", f"(?s{'i' * reader.folded}:{'|'.join(reader.atoms or ['(?!)'])})")


def literal(text: str) -> str:
    """A text in Rust's syntax, which has nothing then that Lark's or JSON's would change."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)


class _Reader:
    """Recursive descent over a pattern that Python takes; `at` is the index of the next character."""

    def __init__(self, pattern: str, param: str, where: str) -> None:
        self.pattern, self.param, self.where, self.at, self.depth = pattern, param, where, 0, 0
        self.flags = ""  # global ones
        self.folded = False  # upper and lower case are one, somewhere
        self.atoms: list[str] = []  # sources of all single characters and classes

    def alternatives(self) -> _Part:
        """Up to a closing parenthesis or the end."""
        parts = [self._sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            parts.append(self._sequence())
        starts, ends = ([i for i in indices if i is not None] for indices in list(zip(*parts, strict=True))[1:])
        return _Part("|".join(part.rust for part in parts), *(min(found, default=None) for found in (starts, ends)))

    def _sequence(self) -> _Part:
        text = ""
        start: int | None = None
        end: int | None = None
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            part = self._item()
            if part.start is not None and text:
                raise self._refuse("an anchor of the start", part.start)
            if end is not None and part.rust:
                raise self._refuse("an anchor of the end", end)
            text += part.rust
            start = part.start if start is None else start
            end = part.end if end is None else end
        return _Part(text, start, end)

    def _item(self) -> _Part:
        """One atom with what repeats it; no text for an anchor, a comment and flags."""
        begin, char = self.at, self.pattern[self.at]
        part = self._anchor() or (self._group() if char == "(" else None)
        if part is None:
            part = _Part(self._char_class() if char == "[" else self._single())
            self.atoms.append(self.pattern[begin : self.at])
        repeat = self._quantifier()
        anchor = part.end if part.start is None else part.start
        if repeat and anchor is not None:
            raise self._refuse("a repeated anchor", anchor)
        return part._replace(rust=part.rust + repeat)

    def _anchor(self) -> _Part | None:
        for spelled, opens in _ANCHORS:
            if self.pattern.startswith(spelled, self.at):
                begin, self.at = self.at, self.at + len(spelled)
                return _Part("", begin, None) if opens else _Part("", None, begin)
        return None

    def _group(self) -> _Part:
        begin = self.at
        for opening, name in _REFUSED_GROUPS.items():
            if self.pattern.startswith(opening, begin):
                raise self._refuse(name, begin)
        header = _GROUP.match(self.pattern, begin)
        self.at = header.end() if header else begin + 1
        flags = self._flags(header, begin) if header else ""
        if header and header[0].endswith(")"):
            return _Part("")
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise RequestError(f"{self.where}groups are nested more than {MAX_NESTING} deep", param=self.param)
        inner = self.alternatives()
        self.depth -= 1
        self.at += 1
        return inner._replace(rust=f"(?{flags}:{inner.rust})")

    def _flags(self, header: re.Match[str], begin: int) -> str:
        """Flags that a group sets, in Rust's syntax; those for the whole pattern are kept."""
        on, off = (header[1] or "").replace("u", ""), header[2] or ""
        if set(on + off) - set("is"):
            raise self._refuse(f"the flags of {header[0]}", begin)
        self.folded = self.folded or "i" in on
        if header[3] == ")":
            self.flags += on
        return on + (f"-{off}" if off else "")

    def _char_class(self) -> str:
        negated = self.pattern.startswith("[^", self.at)
        self.at += 1 + negated
        members = [self._member()]  # a bracket that comes first is a member
        while self.pattern[self.at] != "]":
            members.append(self._member())
        self.at += 1
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _member(self) -> str:
        low = self._char()
        if len(low) > 1:
            return low
        if self.pattern[self.at] != "-" or self.pattern[self.at + 1] == "]":
            return literal(low)
        self.at += 1
        return f"{literal(low)}-{literal(self._char())}"

    def _single(self) -> str:
        if self.pattern[self.at] == ".":
            self.at += 1
            return "."
        char = self._char(boundaries=True)
        return char if len(char) > 1 else literal(char)

    def _char(self, boundaries: bool = False) -> str:
        """One character, or a class in Rust's syntax (longer). `boundaries`: `\\b` is no backspace here."""
        begin = self.at
        if self.pattern[begin] != "\\":
            self.at += 1
            return self._unicode(self.pattern[begin])
        char = self.pattern[begin + 1]
        number = _NUMBER.match(self.pattern, begin + 1)
        self.at = number.end() if number else begin + 2
        if number:
            *hexes, octal, name = number.groups()
            code = int(octal, 8) if octal else int("".join(h or "" for h in hexes) or "0", 16)
            return unicodedata.lookup(name) if name else self._unicode(chr(code))
        if char in _CLASSES:
            return _CLASSES[char]
        if char in "123456789":
            raise self._refuse("a backreference", begin)
        if char in "bB" and boundaries:
            raise self._refuse(f"the boundary \\{char}", begin)
        return self._unicode(_CONTROLS.get(char, char))

    def _quantifier(self) -> str:
        """What repeats the item just read. Laziness changes which match is found, not what matches."""
        count = _COUNT.match(self.pattern, self.at)
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            repeat = self.pattern[self.at]
            self.at += 1
        elif count and (count[1] or count[2]):
            repeat = f"{{{count[1] or '0'}{count[2]}{count[3]}}}"
            self.at = count.end()
        else:
            return ""
        if self.pattern.startswith("+", self.at):
            raise self._refuse("a possessive quantifier", self.at)
        self.at += self.pattern.startswith("?", self.at)
        return repeat

    def _unicode(self, char: str) -> str:
        if "\ud800" <= char <= "\udfff":
            raise RequestError(f"{self.where}U+{ord(char):04X} is half of a surrogate pair", param=self.param)
        return char

    def _refuse(self, what: str, at: int) -> RequestError:
        return RequestError(
            f"{self.where}{what} cannot be enforced (character {at})",
            hint="what is enforced is regular: no look-around, backreference, boundary, atomic group, possessive "
            "quantifier, no anchor but at the ends, no flag but i and s",
            param=self.param,
        )
