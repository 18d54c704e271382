"""MMLU-like: multiple choice after five solved questions of the same subject; one token answers."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import TOPICS, WHY, Prose
from bench.lang.programs._program import Calls, Case, Program

SHOTS = 5


def _question(prose: Prose) -> str:
    options = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", prose.several(WHY, 4), strict=True))
    return f"{prose.question()}\n{options}Answer:"


def _header(subject: str) -> str:
    prose = Prose(f"mmlu {subject}")
    shots = "".join(f"{_question(prose)} {prose.pick('ABCD')}\n\n" for _ in range(SHOTS))
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n{shots}"


def cases(count: int) -> list[Case]:
    """Questions of two subjects, in turns."""
    prose = Prose("mmlu")
    headers = [_header(subject) for subject in TOPICS[:2]]
    return [{"header": headers[i % 2], "question": _question(prose)} for i in range(count)]


@pl.function
def language(s: pl.State, header: str, question: str) -> list[str]:
    """The same in the language."""
    s += header
    s += question
    s += pl.gen("answer", max_tokens=1, ignore_eos=True)
    return [s["answer"]]


async def plain(calls: Calls, header: str, question: str) -> list[str]:
    """One call."""
    return [await calls.complete(header + question, 1)]


PROGRAM = Program("mmlu", "multiple choice after 5 shots", cases, language, plain, size=16)
