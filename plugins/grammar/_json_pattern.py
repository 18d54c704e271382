"""A schema's `pattern` as a regular expression of the JSON strings whose values it is found in."""

from __future__ import annotations

import json
import re

from ._json_regex import CHAR
from ._regex import _Part, _Reader
from ._width import check

_PLAIN = r'[^"\\\x00-\x1f]'
_ESCAPED = ['"', "\\", "/", "\b", "\f", "\n", "\r", "\t"]
_CONTROLS = [chr(code) for code in range(32)]
# Of classes on which Python and ECMAScript differ, what is in both.
_CLASSES = {
    r"\p{Nd}": "0-9",
    r"\p{L}\p{N}_": "A-Za-z0-9_",
    r"\s\u{1c}-\u{1f}": r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}",
}


def pattern_regex(pattern: str, param: str, where: str) -> str:
    """What may stand between the quotes, in the syntax of Rust's `regex` crate: the value has a match somewhere.

    Raises RequestError(param=param) for what is no pattern, one of a huge piece, and one that no automaton can follow.
    """
    check(pattern, param, where)
    return f"(?:{_StringReader(pattern, param, where).alternatives().rust})"


class _StringReader(_Reader):
    """Writes each atom as JSON spells its characters, and any text where a side has no anchor."""

    def alternatives(self) -> _Part:
        """Alternatives within a group must agree on anchors, those of the whole pattern need not."""
        parts = [self._sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            parts.append(self._sequence())
        if self.flags:
            raise self._refuse("a flag", 0)
        if self.depth == 0:
            return _Part("|".join(map(_found_anywhere, parts)))
        if len({(part.start is None, part.end is None) for part in parts}) > 1:
            raise self._refuse("an anchor in some alternatives of a group", self.at)
        return parts[0]._replace(rust="|".join(part.rust for part in parts))

    def _flags(self, header: re.Match[str], begin: int) -> str:
        if header[1] or header[2]:
            raise self._refuse("a flag", begin)
        return ""

    def _char_class(self) -> str:
        begin = self.at
        rust = super()._char_class()
        if not rust.startswith("[^"):
            for theirs, common in _CLASSES.items():
                rust = rust.replace(theirs, common)
        return _spelled(rust, self.pattern[begin : self.at])

    def _single(self) -> str:
        begin = self.at
        rust = super()._single()
        for theirs, common in _CLASSES.items():
            if not rust.startswith("[^"):
                rust = rust.replace(theirs, common)
        return _spelled(r"[^\n]" if rust == "." else rust, self.pattern[begin : self.at])


def _found_anywhere(part: _Part) -> str:
    before = f"{CHAR}*" if part.start is None else ""
    after = f"{CHAR}*" if part.end is None else ""
    return f"{before}(?:{part.rust}){after}"


def _spelled(rust: str, atom: str) -> str:
    """The characters of a class, or a single one, in a JSON string. `atom`: the same for Python."""
    has = re.compile(atom).fullmatch
    escapes = [re.escape(json.dumps(char)[1:-1] if char != "/" else "\\/") for char in _ESCAPED if has(char)]
    controls = [char for char in _CONTROLS if has(char)]
    if len(controls) == len(_CONTROLS):
        escapes.append(r"\\u00[01][0-9a-fA-F]")
    else:
        escapes += [rf"\\u{ord(char):04x}" for char in controls]
    plain = f"[{rust}&&{_PLAIN}]"
    return f"(?:{'|'.join([plain, *escapes])})" if escapes or _is_special(rust) else f"[{rust}]"


def _is_special(rust: str) -> bool:
    """True where the class may hold characters that a string must not have as they are."""
    return re.fullmatch(r"[A-Za-z0-9]|\[[A-Za-z0-9_-]+\]", rust) is None
