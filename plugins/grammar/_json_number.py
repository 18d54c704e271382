"""Numbers between bounds as regular expressions: decimal digits compared from the left."""

from __future__ import annotations

from decimal import Decimal

from ._json_regex import ANY_PLACES, PLACES, any_of, naturals

_MORE = f"[0-9]{{0,{PLACES - 1}}}"


def exact(number: float) -> Decimal:
    """A bound as JSON has it: 0.1 is a tenth."""
    return Decimal(repr(number))


def number(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str | None:
    """A number between bounds, without an exponent. `above`, `below`: the bound itself is out; None: there is none."""
    zero = Decimal(0)
    negative = positive = None
    if low is None or low < 0:
        least, open_end = (zero, False) if high is None or high > 0 else (-high, below)
        negative = _magnitude(least, open_end, None if low is None else -low, above)
    if high is None or high >= 0:
        least, open_end = (zero, False) if low is None or low < 0 else (low, above)
        positive = _magnitude(least, open_end, high, below)
    return any_of([None if negative is None else f"-{negative}", positive])


def _magnitude(least: Decimal, above: bool, most: Decimal | None, below: bool) -> str | None:
    """Numbers without a sign."""
    whole, fraction = _split(least)
    if most is None:
        return any_of([_with_fraction(str(whole), fraction, None, above, False), _any_fraction(whole + 1, None)])
    last, end = _split(most)
    if last < whole:
        return None
    if last == whole:
        return _with_fraction(str(whole), fraction, end, above, below)
    first = _with_fraction(str(whole), fraction, None, above, False)
    return any_of([first, _any_fraction(whole + 1, last - 1), _with_fraction(str(last), "", end, False, below)])


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits behind the point, without zeros at their end."""
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _any_fraction(low: int, high: int | None) -> str | None:
    whole = naturals(low, high)
    return None if whole is None else rf"{whole}(?:\.{ANY_PLACES})?"


def _with_fraction(whole: str, low: str, high: str | None, above: bool, below: bool) -> str | None:
    digits, bare = _digits(low, high, above, below)
    if digits is None:
        return whole if bare else None
    return rf"{whole}(?:\.{digits})" + ("?" if bare else "")


def _digits(low: str, high: str | None, above: bool, below: bool) -> tuple[str | None, bool]:
    """Digits behind a point from `low` to `high`, one at least; and whether there may be none, which is zero.

    Both end without zeros; `high` None is all nines.
    """
    bare = not low and not above and not (high == "" and below)
    if not low and high is None:
        return (f"0{{0,{PLACES - 1}}}[1-9]{_MORE}" if above else ANY_PLACES), bare
    if high == "":
        return (None if low or above or below else f"0{{1,{PLACES}}}"), bare
    first, last = int(low[:1] or 0), 9 if high is None else int(high[0])
    if first > last:
        return None, bare
    rest = None if high is None else high[1:]
    if first == last:
        return _behind(first, *_digits(low[1:], rest, above, below)), bare
    parts = [_behind(first, *_digits(low[1:], None, above, False))]
    if last - first > 1:
        parts.append(f"[{first + 1}-{last - 1}]{_MORE}")
    parts.append(_behind(last, *_digits("", rest, False, below)))
    return any_of(parts), bare


def _behind(digit: int, digits: str | None, bare: bool) -> str | None:
    if digits is None:
        return str(digit) if bare else None
    return f"{digit}(?:{digits})" + ("?" if bare else "")
