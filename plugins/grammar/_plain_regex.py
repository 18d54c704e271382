"""Regular expressions with Python's meaning, written with literals, explicit classes, groups and counts only.

That is what every library reads alike. Classes of Unicode are narrowed to parts that all agree on: what matches the
rewritten pattern matches the given one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from phloem.errors import RequestError

from ._regex import translate

_parser: Any = re._parser  # type: ignore[attr-defined]  # the only complete reader of Python's own syntax
_SPACES = [(9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACES += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)
_MANY = 1000  # repetitions beyond this are refused: automata grow with them

Ranges = list[tuple[int, int]]


_UNSPELLED = [(0, 31), (34, 34), (92, 92)]  # what JSON cannot have in a string as it is


def plain(pattern: str, param: str, where: str = "", *, in_json: bool = False) -> str:
    """A pattern that matches what `re.fullmatch(pattern, text)` matches, or part of it.

    With `in_json` it is a keyword of a schema: searched for, and without what a JSON string must escape.

    Raises RequestError(param=param) with the place of what no automaton can follow.
    """
    translate(pattern, param, where)  # refuses, with positions, what is not regular
    tree = _parser.parse(pattern)
    barred = _UNSPELLED if in_json else []
    return _Writer(param, where, tree.state.flags, barred).sequence(_unanchored(list(tree), in_json))


def _unanchored(items: list[Any], search: bool) -> list[Any]:
    """Without the outer anchors; for a search, with any text where there is none."""
    begin = bool(items) and str(items[0][0]) == "AT"
    end = len(items) > begin and str(items[-1][0]) == "AT"
    inner = items[begin : len(items) - end]
    if not search or not inner:
        return inner
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [(items[0][0], (None, [_unanchored(list(option), True) for option in items[0][1][1]]))]
    anything = (_parser.MAX_REPEAT, (0, _parser.MAXREPEAT, [(_parser.ANY, "all")]))
    return ([] if begin else [anything]) + inner + ([] if end else [anything])


class _Writer:
    """Turns the parsed tree back into text."""

    def __init__(self, param: str, where: str, flags: int, barred: Ranges) -> None:
        self._param, self._where = param, where
        self._flags, self._barred = flags, barred

    def _class(self, ranges: Ranges) -> str:
        """One character of these ranges, but none that is barred."""
        allowed = _inverse([*_inverse(ranges), *self._barred]) if self._barred else ranges
        if not allowed:
            raise RequestError(f"{self._where}a character that JSON must escape is refused", param=self._param)
        return _spelled(allowed)

    def sequence(self, items: Iterable[Any]) -> str:
        """A list of parsed items."""
        return "".join(self._item(str(name), argument) for name, argument in items)

    def _item(self, name: str, argument: Any) -> str:
        if name in ("LITERAL", "NOT_LITERAL"):
            one = self._folded([(argument, argument)])
            return self._class(_inverse(one) if name == "NOT_LITERAL" else one)
        if name == "ANY":
            whole = argument == "all" or self._flags & re.DOTALL
            return self._class([(0, _LAST)] if whole else _inverse([(10, 10)]))
        if name == "IN":
            return self._class(self._members(argument))
        if name == "BRANCH":
            return f"(?:{'|'.join(self.sequence(option) for option in argument[1])})"
        if name == "SUBPATTERN":
            return self._group(*argument)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*argument)
        if name == "AT" and not self._barred:  # `translate` knows that it stands at an end
            return ""
        raise RequestError(f"{self._where}{name.lower()} cannot be enforced", param=self._param)

    def _group(self, number: int | None, add: int, remove: int, items: Any) -> str:
        before = self._flags
        self._flags = (before | add) & ~remove
        text = self.sequence(items)
        self._flags = before
        return f"(?:{text})"

    def _repeat(self, least: int, most: Any, items: Any) -> str:
        text, endless = self.sequence(items), most == _parser.MAXREPEAT
        if least > _MANY or (not endless and most > _MANY):
            raise RequestError(f"{self._where}more than {_MANY} repetitions are refused", param=self._param)
        if not text:
            return ""
        if endless:
            return f"(?:{text})" + {0: "*", 1: "+"}.get(least, f"{{{least},}}")
        some = f"(?:{text})" if most == 1 else f"(?:{text}){{{max(least, 1)},{most}}}"
        return some if least else f"(?:{some}|)"  # a library reads (ab+)? as a?(b+)?

    def _members(self, items: Sequence[Any]) -> Ranges:
        ranges: Ranges = []
        negated = bool(items) and str(items[0][0]) == "NEGATE"
        for name, argument in items[negated:]:
            if str(name) == "CATEGORY":
                ranges += self._category(str(argument), negated)
            else:
                ranges += self._folded([(argument, argument) if str(name) == "LITERAL" else argument])
        return _inverse(ranges) if negated else ranges

    def _category(self, name: str, outside: bool) -> Ranges:
        """Inside a class the part that all agree on; in a negated one all that Python counts in."""
        ascii_only = bool(self._flags & re.ASCII)
        kind, negative = name.removeprefix("CATEGORY_").removeprefix("NOT_").lower(), "_NOT_" in name
        if kind == "space":
            ranges = [(9, 13), (32, 32)] if ascii_only else _SPACES
            return _inverse(ranges) if negative else ranges
        small = [(48, 57)] if kind == "digit" else _WORD
        # Where a class takes characters away, all that Python counts in must go.
        ranges = _unicode_class(kind) if outside != negative and not ascii_only else small
        return _inverse(ranges) if negative else ranges

    def _folded(self, ranges: Ranges) -> Ranges:
        if not self._flags & re.IGNORECASE:
            return ranges
        if any(low != high and high - low > 512 for low, high in ranges):
            raise RequestError(f"{self._where}a wide class cannot ignore case", param=self._param)
        both = {ord(c) for low, high in ranges for code in range(low, high + 1) for c in _cases(chr(code))}
        return [(code, code) for code in sorted(both)]


def _cases(char: str) -> list[str]:
    return [form for form in {char, char.lower(), char.upper()} if len(form) == 1]


@cache
def _unicode_class(kind: str) -> Ranges:
    """All characters that Python's \\d or \\w matches."""
    ranges: Ranges = []
    for code in range(_LAST + 1):
        char = chr(code)
        if char.isdecimal() if kind == "digit" else char.isalnum() or char == "_":
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1] = (ranges[-1][0], code)
            else:
                ranges.append((code, code))
    return ranges


def _inverse(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are none."""
    out: Ranges = []
    at = 0
    for low, high in sorted([*ranges, _SURROGATES]):
        if low > at:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return [*out, (at, _LAST)] if at <= _LAST else out


def _spelled(ranges: Ranges) -> str:
    """One character of these ranges."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    return f"[{''.join(_escaped(a) if a == b else f'{_escaped(a)}-{_escaped(b)}' for a, b in ranges)}]"


def _escaped(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    if 0x20 <= code < 0x7F:
        return f"\\{char}" if char in r"\^$.|?*+()[]{}-/" else char
    return f"\\u{{{code:x}}}" if code > 0xFFFF else f"\\u{code:04x}"
