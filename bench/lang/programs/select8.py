"""Select alone: eight choices of some words each, which begin alike in pairs."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import DID, WHAT, WHEN, WHO, Prose
from bench.lang.programs._program import Calls, Case, Program

CHOICES = 8


def cases(count: int) -> list[Case]:
    """A text of about 200 tokens, no two with a beginning in common."""
    prose = Prose("select8")
    made = []
    for _ in range(count):
        starts = [f" {did} {what}" for did, what in zip(prose.several(DID, 4), prose.several(WHAT, 4), strict=True)]
        choices = [f"{start} {when}." for start in starts for when in prose.several(WHEN, CHOICES // 4)]
        made.append({"text": f"{prose.text(8)} In the end {prose.pick(WHO)}", "choices": choices})
    return made


@pl.function
def language(s: pl.State, text: str, choices: list[str]) -> list[str]:
    """The same in the language."""
    s += text + pl.select("end", choices=choices)
    return [s["end"]]


async def plain(calls: Calls, text: str, choices: list[str]) -> list[str]:
    """A call per choice, side by side."""
    return [await calls.choose(text, choices)]


PROGRAM = Program("select8", "select one of 8 choices", cases, language, plain, size=4)
