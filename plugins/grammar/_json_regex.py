"""Regular expressions of JSON's parts, in the syntax of Rust's `regex` crate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._regex import literal

# One character of a string, escaped only where JSON demands it (and `\/`, which models write).
CHAR = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u00[01][0-9a-fA-F]))'
# Digits of a number that no bound ends. More say nothing: these hold every 64-bit integer, and tell any two doubles
# apart. Models like to repeat a digit, and without an end they do so until their tokens run out.
WHOLE, PLACES = 20, 17
_NATURAL = f"(?:0|[1-9][0-9]{{0,{WHOLE - 1}}})"
ANY_PLACES = f"[0-9]{{1,{PLACES}}}"
ENDLESS_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
NUMBER = rf"-?{_NATURAL}(?:\.{ANY_PLACES})?(?:[eE][+-]?[0-9]{{1,3}})?"
_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DAYS = "[0-9]+D"
_MONTHS = f"(?:[0-9]+M(?:{_DAYS})?|{_DAYS})"
_SECONDS = "[0-9]+S"
_MINUTES = f"(?:[0-9]+M(?:{_SECONDS})?|{_SECONDS})"
_CLOCKED = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES})"
_DURATION = f"P(?:(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS})(?:{_CLOCKED})?|{_CLOCKED}|[0-9]+W)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,14}[a-z0-9])?"
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_URI_CHAR}*)*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:[A-Za-z0-9._~-]+(?::[0-9]{{1,5}})?)?{_PATH}|{_URI_CHAR}+{_PATH})"
    rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
)
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = (
    f"(?:{_GROUP}(?::{_GROUP}){{7}}|"
    + "|".join(
        ("" if before == 0 else f"{_GROUP}(?::{_GROUP}){{{before - 1}}}")
        + "::"
        + ("" if before == 7 else f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?")
        for before in range(8)
    )
    + ")"
)
# Each is a part of what the format allows, and most of what is written in practice.
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "email": rf"[A-Za-z0-9_+-]{{1,16}}(?:\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "uri": _URI,
    "duration": _DURATION,
}


def dumps(value: Any) -> str:
    """A scalar as JSON; whole numbers without a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def any_of(parts: Sequence[str | None]) -> str | None:
    """One of them; None is a language without a text."""
    found = list(dict.fromkeys(part for part in parts if part is not None))
    if not found:
        return None
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def repeated(part: str, least: int, most: int | None) -> str:
    """`least` to `most` times, None is without bound."""
    if most == 0:
        return ""
    signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
    return f"(?:{part})" + signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


def string(least: int, most: int | None) -> str:
    """A string of so many characters."""
    return f'"{repeated(CHAR, least, most)}"'


def other_key(names: Iterable[str]) -> str:
    """A string that is none of the names; without escapes where a name has a control character, spelled in two ways."""
    if not (names := list(names)):
        return string(0, None)
    if any(char < " " for name in names for char in name):
        plain = [list(name) for name in names if dumps(name)[1:-1] == name]
        return f'"{_none_of(plain, escapes=False)}"'
    spelled = [[dumps(char)[1:-1] for char in name] for name in names]
    return f'"{_none_of(spelled, escapes=True)}"'


def _none_of(names: Sequence[Sequence[str]], escapes: bool) -> str:
    """Any text but these names, each a list of characters as JSON spells them: by first ones, then by what follows."""
    if not names:
        return f"{_other_than([], escapes)}*"
    heads = sorted({name[0] for name in names if name})
    behind = {head: [name[1:] for name in names if name[:1] == [head]] for head in heads}
    branches = [f"{literal(head)}{_none_of(rest, escapes)}" for head, rest in behind.items()]
    branches.append(f"{_other_than(heads, escapes)}{_other_than([], escapes)}*")
    return f"(?:{'|'.join(branches)})" + ("" if [] in [list(name) for name in names] else "?")


def _other_than(heads: Sequence[str], escapes: bool) -> str:
    """One character but these."""
    plain = rf"[^\"\\\x00-\x1f{''.join(literal(head) for head in heads if len(head) == 1)}]"
    if not escapes:
        return plain
    free = "".join(f"\\{letter}" if letter in '"\\' else letter for letter in '"\\bfnrt' if f"\\{letter}" not in heads)
    return rf"(?:{plain}|\\(?:[{free}]|u00[01][0-9a-fA-F]))"


def integer(low: float | None, high: float | None) -> str | None:
    """A whole number between bounds, which are in; None is without bound, and as the result: there is none."""
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    below = naturals(1 if most is None else max(1, -most), None if least is None else -least)
    above = naturals(0 if least is None else max(0, least), most)
    return any_of([None if below is None else f"-{below}", above])


def naturals(least: int, most: int | None) -> str | None:
    """Whole numbers from `least`, which is not negative, to `most`."""
    if most is not None and most < least:
        return None
    first, last = str(least), "9" * len(str(least)) if most is None else str(most)
    parts = []
    for digits in range(len(first), len(last) + 1):
        low = first if digits == len(first) else "1" + "0" * (digits - 1)
        parts.append(_between(low, last if digits == len(last) else "9" * digits))
    if most is None:
        parts.append(f"[1-9][0-9]{{{len(first)},{max(len(first), WHOLE - 1)}}}")
    return any_of(parts)


def _between(low: str, high: str) -> str:
    """Decimal numbers of one length."""
    if not low or low[0] == high[0]:
        return low[:1] + _between(low[1:], high[1:]) if low else ""
    rest, parts, start, stop = len(low) - 1, [], int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(low[0] + _between(low[1:], "9" * rest))
        start += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _between("0" * rest, high[1:]))
        stop -= 1
    if start <= stop:
        parts.append(f"[{start}-{stop}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
