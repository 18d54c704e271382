"""A DSPy-like RAG pipeline: query, passages, rationale, answer, with demonstrations before each stage."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import TOPICS, Prose
from bench.lang.programs._program import Calls, Case, Program

PASSAGES, QUERY, RATIONALE, ANSWER = 3, 8, 24, 8


def _passages(prose: Prose) -> str:
    return "".join(f"[{i + 1}] {prose.pick(TOPICS)}: {prose.text(2)}\n" for i in range(PASSAGES))


def cases(count: int) -> list[Case]:
    """Demonstrations of both stages for all; a question, and the passages that are found for it."""
    shots = Prose("rag shots")
    search = "Write a search query that helps to answer the question.\n\n" + "".join(
        f"Question: {shots.question()}\nQuery: {shots.pick(TOPICS)} and {shots.pick(TOPICS)}\n\n" for _ in range(3)
    )
    answer = "Answer the question from the context.\n\n" + "".join(
        f"Context:\n{_passages(shots)}Question: {shots.question()}\nReasoning: {shots.sentence()}\nAnswer: yes\n\n"
        for _ in range(1)
    )
    prose = Prose("rag")
    return [
        {"search": search, "answer": answer, "question": prose.question(), "found": _passages(prose)}
        for _ in range(count)
    ]


@pl.function
def language(s: pl.State, search: str, answer: str, question: str, found: str) -> list[str]:
    """The same in the language."""
    with s.copy() as first:
        first += search
        first += f"Question: {question}\nQuery:" + pl.gen("query", max_tokens=QUERY, stop="\n")
        query = first["query"]
    s += answer
    s += f"Context:\n{found}Question: {question}\nReasoning:" + pl.gen("reasoning", max_tokens=RATIONALE, stop="\n")
    s += "\nAnswer:" + pl.gen("answer", max_tokens=ANSWER, stop="\n")
    return [query, s["reasoning"], s["answer"]]


async def plain(calls: Calls, search: str, answer: str, question: str, found: str) -> list[str]:
    """Three calls, one after another."""
    query = await calls.complete(f"{search}Question: {question}\nQuery:", QUERY, stop="\n")
    text = f"{answer}Context:\n{found}Question: {question}\nReasoning:"
    reasoning = await calls.complete(text, RATIONALE, stop="\n")
    return [query, reasoning, await calls.complete(f"{text}{reasoning}\nAnswer:", ANSWER, stop="\n")]


PROGRAM = Program("rag", "query, passages, rationale, answer", cases, language, plain, size=6)
