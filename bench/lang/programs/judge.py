"""LLM judge, branch-solve-merge: an essay is judged on six dimensions side by side, then merged into a grade."""

from __future__ import annotations

import asyncio

import phloem.lang as pl
from bench.lang.data import Prose
from bench.lang.programs._program import Calls, Case, Program

DIMENSIONS = ("clarity", "originality", "evidence", "style", "order", "length")
JUDGEMENT = 16
GRADES = [" A", " B", " C"]


def cases(count: int) -> list[Case]:
    """Essays of twelve sentences."""
    prose = Prose("judge")
    return [{"essay": f"An essay to be judged.\n\n{prose.text(12)}\n\n"} for _ in range(count)]


def _ask(dimension: str) -> str:
    return f"Judge its {dimension} in a few words:"


def _merge(judgements: list[str]) -> str:
    lines = (f"{name}: {text}\n" for name, text in zip(DIMENSIONS, judgements, strict=True))
    return "Judgements:\n" + "".join(lines) + "The grade that follows, from A to C:"


@pl.function
def language(s: pl.State, essay: str) -> list[str]:
    """The same in the language."""
    s += essay
    branches = s.fork(len(DIMENSIONS))
    branches += lambda i: _ask(DIMENSIONS[i]) + pl.gen("judgement", max_tokens=JUDGEMENT, ignore_eos=True)
    judgements = [branch["judgement"] for branch in branches]
    s += _merge(judgements) + pl.select("grade", choices=GRADES)
    return [*judgements, s["grade"]]


async def plain(calls: Calls, essay: str) -> list[str]:
    """The grade waits for all judgements."""
    asked = (calls.complete(essay + _ask(dimension), JUDGEMENT) for dimension in DIMENSIONS)
    judgements = list(await asyncio.gather(*asked))
    return [*judgements, await calls.choose(essay + _merge(judgements), GRADES)]


PROGRAM = Program("judge", "branch 6, solve, merge", cases, language, plain, size=3, fork_heavy=True)
