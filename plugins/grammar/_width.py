"""How long a text a regular expression may force: what is forced somewhere in it is looked up byte by byte."""

from __future__ import annotations

import re
from typing import Any

from phloem.errors import RequestError

LONGEST = 100_000  # characters; a library takes up to 3 us for each, at once, in a step that others wait for
_parser: Any = re._parser  # type: ignore[attr-defined]  # knows how wide a match is


def check(pattern: str, param: str, where: str = "") -> None:
    """Raises RequestError(param=param) for what is no pattern of Python's, and for a huge one, as `bounded` does."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"{where}not a regular expression: {error}", param=param) from None
    bounded(pattern, param, where)


def bounded(pattern: str, param: str, where: str = "") -> None:
    """Raises RequestError(param=param) for a pattern with a huge piece; nothing for what Python does not take.

    A piece counts by its shortest match, wherever it stands: `b|(a{1000}){1000}` forces a million characters behind an
    `a`. Called once per pattern, when a grammar is compiled.
    """
    try:
        todo = [_parser.parse(pattern)]
    except (re.error, OverflowError, RecursionError):
        return
    while todo:
        piece = todo.pop()
        if (width := piece.getwidth()[0]) > LONGEST:
            problem = f"{where}the shortest text of a part of it has {width} characters, and {LONGEST} are the most"
            raise RequestError(problem, hint="repeat less often", param=param)
        todo += [inner for _, argument in piece.data for inner in _pieces(argument)]


def span(pattern: str) -> tuple[int, int]:
    """Fewest and most characters of what a pattern of Python's matches."""
    low, high = _parser.parse(pattern).getwidth()
    return int(low), int(high)


def _pieces(argument: Any) -> list[Any]:
    if isinstance(argument, (list, tuple)):
        return [piece for one in argument for piece in _pieces(one)]
    return [argument] if isinstance(argument, _parser.SubPattern) else []
