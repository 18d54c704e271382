"""HellaSwag-like: which of four endings continues a text, after solved examples."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import DID, WHAT, WHEN, WHO, Prose
from bench.lang.programs._program import Calls, Case, Program

SHOTS = 8


def _start(prose: Prose) -> str:
    return f"{prose.sentence()} Then {prose.pick(WHO)}"


def _ending(prose: Prose) -> str:
    return f" {prose.pick(DID)} {prose.pick(WHAT)} {prose.pick(WHEN)}."


def cases(count: int) -> list[Case]:
    """One set of examples for all."""
    shots = Prose("hellaswag shots")
    header = "".join(f"Activity: {_start(shots)}{_ending(shots)}\n\n" for _ in range(SHOTS))
    prose = Prose("hellaswag")
    return [
        {"header": header, "start": f"Activity: {_start(prose)}", "endings": [_ending(prose) for _ in range(4)]}
        for _ in range(count)
    ]


@pl.function
def language(s: pl.State, header: str, start: str, endings: list[str]) -> list[str]:
    """The same in the language."""
    s += header
    s += start
    s += pl.select("ending", choices=endings)
    return [s["ending"]]


async def plain(calls: Calls, header: str, start: str, endings: list[str]) -> list[str]:
    """Four calls, side by side."""
    return [await calls.choose(header + start, endings)]


PROGRAM = Program("hellaswag", "select one of 4 endings after 8 shots", cases, language, plain, size=4)
