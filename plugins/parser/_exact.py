"""JSON values for other notations, and words of other notations as JSON, with every digit kept."""

from __future__ import annotations

import json
import re
from typing import Any

from phloem.errors import RequestError

_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DIGITS = r"[0-9](?:_?[0-9])*"
_FLOAT = re.compile(rf"([+-]?)({_DIGITS})?(?:\.({_DIGITS})?)?(?:[eE]([+-]?{_DIGITS}))?")
_INTEGER = re.compile(r"([+-]?)(0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+)")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class Number(str):
    """A number as it was written: nothing is gained, and digits may be lost, by making a float of it."""

    __slots__ = ()


def loads(arguments: str, tool: str) -> dict[str, Any]:
    """The arguments of an earlier call, numbers as `Number`. Raises RequestError(param="messages")."""
    try:
        value = json.loads(arguments or "{}", parse_int=Number, parse_float=Number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"the arguments of an earlier call of {tool} are no JSON object", param="messages")
    return value


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_word(word: str) -> str | None:
    """JSON for a constant or number of JSON or Python, its digits kept; None for any other word."""
    if word in _WORDS or _JSON_NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    if (match := _INTEGER.fullmatch(word)) is not None:
        sign, digits = match.groups()
        return f"{'-' if sign == '-' else ''}{int(digits, 0)}"
    match = _FLOAT.fullmatch(word)
    if match is None or not (match[2] or match[3]):
        return None
    sign, whole, part, exponent = match[1], match[2] or "0", match[3] or "", match[4]
    if "." not in word and exponent is None and whole.strip("0_") and whole.startswith("0"):
        return None  # Python refuses leading zeros of an integer, so does this
    text = ("-" if sign == "-" else "") + (whole.replace("_", "").lstrip("0") or "0")
    if "." in word:
        text += "." + (part.replace("_", "") or "0")
    return text + (f"e{exponent.replace('_', '')}" if exponent else "")
