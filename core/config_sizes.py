"""Sizes and counts as a configuration spells them: whole numbers, with a suffix or without."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kKmMgGtT])(?:i[bB])?)?")
_UNITS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: Any) -> int:
    """`2GiB`, `16k`, `4096`: suffixes k, M, G, T (or KiB, MiB, ...) are powers of 1024, for bytes and counts alike."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        size = float(match[1]) * 1024 ** _UNITS[match[2] and match[2].lower()]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError("must be a whole number, or one with a suffix such as 16k or 2GiB (powers of 1024)")
    if not math.isfinite(size) or size != int(size):
        raise ValueError("must be a whole number")
    return int(size)


def _auto_size(value: Any) -> Any:
    if value != "auto" and parse_size(value) < 1:
        raise ValueError("must be auto, or at least 1")
    return value if value == "auto" else parse_size(value)


_SIZE_SCHEMA = {
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9.]+ *([kKmMgGtT](i[bB])?)?$"}],
    "format": "size",
}
_AUTO_SCHEMA = {"anyOf": [{"const": "auto"}, _SIZE_SCHEMA]}
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(_SIZE_SCHEMA)]
AutoSize = Annotated[int | Literal["auto"], BeforeValidator(_auto_size), WithJsonSchema(_AUTO_SCHEMA)]
