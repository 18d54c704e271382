"""Skeleton of thought: an outline is written, then four of its points are written out side by side."""

from __future__ import annotations

import asyncio

import phloem.lang as pl
from bench.lang.data import Prose
from bench.lang.programs._program import Calls, Case, Program

POINTS, OUTLINE, TEXT = 4, 24, 24


def cases(count: int) -> list[Case]:
    """Instructions for all; a question and what it is about."""
    rules = "You write outlines of short points and then expand them. " + Prose("skeleton rules").text(3) + "\n\n"
    prose = Prose("skeleton")
    return [{"rules": rules, "question": f"{prose.text(3)} {prose.question()}\nOutline:\n1."} for _ in range(count)]


def _point(i: int) -> str:
    return f"\n\nPoint {i + 1} in one or two sentences:"


@pl.function
def language(s: pl.State, rules: str, question: str) -> list[str]:
    """The same in the language."""
    s += rules
    s += question + pl.gen("outline", max_tokens=OUTLINE, ignore_eos=True)
    branches = s.fork(POINTS)
    branches += lambda i: _point(i) + pl.gen("text", max_tokens=TEXT, ignore_eos=True)
    return [s["outline"], *(branch["text"] for branch in branches)]


async def plain(calls: Calls, rules: str, question: str) -> list[str]:
    """The points wait for the outline only."""
    text = rules + question
    outline = await calls.complete(text, OUTLINE)
    points = await asyncio.gather(*(calls.complete(text + outline + _point(i), TEXT) for i in range(POINTS)))
    return [outline, *points]


PROGRAM = Program("skeleton", "outline, then 4 points", cases, language, plain, size=4, fork_heavy=True)
