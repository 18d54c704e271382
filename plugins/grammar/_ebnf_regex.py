"""Regular expressions with Python's meaning as expressions of xgrammar's EBNF: classes, groups and counts.

Classes of Unicode are narrowed to parts on which Python and ECMAScript agree: what matches the expression matches the
pattern. The library's own reader of patterns differs from Python in places, and takes `(ab+)?` for `a?(b+)?`.
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
_HEX = re.compile(r"\\u\{([0-9a-f]+)\}")
_MANY = 1000  # repetitions beyond this are refused: automata grow with them

_UNSPELLED = [(0, 31), (34, 34), (92, 92)]  # what JSON cannot have in a string as it is
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}  # escapes of one letter

Ranges = list[tuple[int, int]]


def matching(pattern: str, param: str, where: str = "") -> str:
    """The texts that `re.fullmatch(pattern, text)` matches, or part of them.

    Raises RequestError(param=param) with the place of what no automaton can follow.
    """
    translate(pattern, param, where)  # refuses, with positions, what is not regular
    return generated(pattern, param, where)


def generated(pattern: str, param: str = "", where: str = "") -> str:
    """As `matching`, for a pattern that is written here."""
    tree = _parser.parse(_HEX.sub(lambda code: f"\\U{int(code[1], 16):08x}", pattern))
    return Writer(param, where, tree.state.flags, in_json=False).alternatives(_unanchored(list(tree), search=False))


def found_in_json(pattern: str, param: str, where: str = "") -> str:
    """What may stand between the quotes of a JSON string whose value has a match of the pattern somewhere."""
    translate(pattern, param, where)
    tree = _parser.parse(pattern)
    return Writer(param, where, tree.state.flags, in_json=True).alternatives(_unanchored(list(tree), search=True))


def counted_in_json(pattern: str, least: int, most: int | None) -> str | None:
    """As `found_in_json`, of values of so many characters; None unless one class, repeated, makes up the difference.

    `pattern` is one that `found_in_json` takes.
    """
    tree = _parser.parse(pattern)
    items = _unanchored(list(tree), search=True)
    writer = Writer("", "", tree.state.flags, in_json=True)
    free, fixed = -1, 0
    for i, (name, argument) in enumerate(items):
        single = argument[2] if str(name) in ("MAX_REPEAT", "MIN_REPEAT") else [(name, argument)]
        if len(single) != 1 or writer.ranges(str(single[0][0]), single[0][1]) is None:
            return None
        low, high = argument[:2] if str(name).endswith("REPEAT") else (1, 1)
        if low == high:
            fixed += low
        elif free >= 0:
            return None
        else:
            free = i
    if free < 0:
        return None
    low, high, single = items[free][1]
    low = max(low, least - fixed)
    high = high if most is None else min(high, most - fixed)
    if high < low:
        return None
    items[free] = (items[free][0], (low, high, single))
    return writer.alternatives(items)


def _unanchored(items: list[Any], search: bool) -> list[Any]:
    """Without the outer anchors; for a search, with any text where there is none."""
    begin = bool(items) and str(items[0][0]) == "AT"
    end = len(items) > begin and str(items[-1][0]) == "AT"
    inner = items[begin : len(items) - end]
    if not search or (begin and end and not inner):
        return inner
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [(items[0][0], (None, [_unanchored(list(option), True) for option in items[0][1][1]]))]
    anything = (_parser.MAX_REPEAT, (0, _parser.MAXREPEAT, [(_parser.ANY, "all")]))
    return ([] if begin else [anything]) + inner + ([] if end else [anything])


class Writer:
    """Turns the parsed tree into text. Every method's result can stand in a sequence as it is."""

    def __init__(self, param: str, where: str, flags: int, *, in_json: bool, widest: bool = False) -> None:
        """`widest`: classes hold all that Python counts in; for patterns that must not match."""
        self._param, self._where = param, where
        self._flags, self._in_json, self._widest = flags, in_json, widest
        self._counted = False  # within a count: a character that may be escaped or not is not

    def char(self, ranges: Ranges) -> str:
        """One character of these ranges, as JSON spells it where it is in a string."""
        if not self._in_json:
            return _spelled(ranges) if ranges else self._nothing()
        plain = _inverse([*_inverse(ranges), *_UNSPELLED])
        escapes = [
            code for low, high in ranges for code in range(low, min(high, 92) + 1) if code < 32 or code in _SHORT
        ]
        if not ranges:
            return self._nothing()
        parts = [_spelled(plain)] if plain else []
        escapes = [] if parts and self._counted else escapes
        short = "".join(_SHORT[code].replace("\\", "\\\\") for code in escapes if code in _SHORT)
        parts += [rf'"\\" [{short}]'] if short else []
        if len([code for code in escapes if code < 32]) == 32:
            parts.append(r'"\\u00" [01] [0-9a-fA-F]')
        else:
            parts += [rf'"\\u{code:04x}"' for code in escapes if code < 32]
        return parts[0] if parts == [_spelled(plain)] else f"({' | '.join(parts)})"

    def _nothing(self) -> str:
        raise RequestError(f"{self._where}a class without a character matches nothing", param=self._param)

    def alternatives(self, items: Sequence[Any]) -> str:
        """A whole pattern: a list of parsed items."""
        return f"({self.sequence(items)})"

    def sequence(self, items: Iterable[Any]) -> str:
        """A list of parsed items; never without a text."""
        return " ".join(filter(None, (self._item(str(name), argument) for name, argument in items))) or '""'

    def ranges(self, name: str, argument: Any) -> Ranges | None:
        """Of a parsed item that is one character, which ones; None of any other."""
        if name in ("LITERAL", "NOT_LITERAL"):
            one = self._folded([(argument, argument)])
            return _inverse(one) if name == "NOT_LITERAL" else one
        if name == "ANY":
            return [(0, _LAST)] if argument == "all" or self._flags & re.DOTALL else _inverse([(10, 10)])
        return self._members(argument) if name == "IN" else None

    def _item(self, name: str, argument: Any) -> str:
        if (ranges := self.ranges(name, argument)) is not None:
            return self.char(ranges)
        if name == "BRANCH":
            return f"({' | '.join(self.sequence(option) for option in argument[1])})"
        if name == "SUBPATTERN":
            return self._group(*argument)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*argument)
        if name == "AT" and not self._in_json:  # `translate` knows that it stands at an end
            return ""
        raise RequestError(f"{self._where}{name.lower()} cannot be enforced", param=self._param)

    def _group(self, number: int | None, add: int, remove: int, items: Any) -> str:
        before = self._flags
        self._flags = (before | add) & ~remove
        text = self.sequence(items)
        self._flags = before
        return f"({text})"

    def _repeat(self, least: int, most: Any, items: Any) -> str:
        endless = most == _parser.MAXREPEAT
        counted, self._counted = self._counted, self._counted or (max(least, 0 if endless else most) > 1)
        text = self.sequence(items)
        self._counted = counted
        if least > _MANY or (not endless and most > _MANY):
            raise RequestError(f"{self._where}more than {_MANY} repetitions are refused", param=self._param)
        if most == 0:
            return ""
        signs = {(0, _parser.MAXREPEAT): "*", (1, _parser.MAXREPEAT): "+", (0, 1): "?"}
        return f"({text})" + signs.get((least, most), f"{{{least},{'' if endless else most}}}")

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
        ranges = _unicode_class(kind) if (outside != self._widest) != negative and not ascii_only else small
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
    """One character of these ranges: by those it is not, where these are few, which the library follows faster."""
    others = _inverse(ranges)
    negated = bool(others) and others[-1][1] < 128
    shown = others if negated else ranges
    members = "".join(_escaped(a) if a == b else f"{_escaped(a)}-{_escaped(b)}" for a, b in shown)
    return f"[{'^' if negated else ''}{members}]"


def _escaped(code: int) -> str:
    if 0x20 <= code < 0x7F:
        return f"\\{chr(code)}" if chr(code) in r"\^[]-" else chr(code)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
