"""Tree of thought: three proposals, two elaborations of each, each rated; an answer follows the best."""

from __future__ import annotations

import asyncio

import phloem.lang as pl
from bench.lang.data import Prose
from bench.lang.programs._program import Calls, Case, Program

PROPOSALS, ELABORATIONS, STEP, ANSWER = 3, 2, 16, 24
MARKS = [" bad", " fair", " good"]  # in the order of their worth
RATE = "\nIs this a good, a fair or a bad way to the answer? It is"


def cases(count: int) -> list[Case]:
    """A setting of some sentences and a question."""
    prose = Prose("tree")
    return [{"task": f"{prose.text(8)}\nQuestion: {prose.question()}\n"} for _ in range(count)]


def _open(level: int, branch: int) -> str:
    return f"\nStep {level}, idea {branch + 1}:"


@pl.function
def language(s: pl.State, task: str) -> list[str]:
    """The same in the language."""
    s += task
    leaves, marks, written = [], [], []
    proposals = s.fork(PROPOSALS)
    proposals += lambda i: _open(1, i) + pl.gen("step", max_tokens=STEP, ignore_eos=True)
    for proposal in proposals:
        elaborations = proposal.fork(ELABORATIONS)
        elaborations += lambda i: _open(2, i) + pl.gen("more", max_tokens=STEP, ignore_eos=True)
        for leaf in elaborations:
            rating = leaf.fork(1)[0]
            rating += RATE + pl.select("mark", choices=MARKS)
            leaves.append(leaf)
            marks.append(rating)
    written = [proposal["step"] for proposal in proposals] + [leaf["more"] for leaf in leaves]
    best = max(range(len(leaves)), key=lambda i: (MARKS.index(marks[i]["mark"]), -i))
    leaves[best] += "\nAnswer:" + pl.gen("answer", max_tokens=ANSWER, ignore_eos=True)
    return [*written, *(mark["mark"] for mark in marks), leaves[best]["answer"]]


async def plain(calls: Calls, task: str) -> list[str]:
    """The branches of a level do not wait for each other."""

    async def elaborate(start: str) -> tuple[str, str, str]:
        more = await calls.complete(start, STEP)
        return more, await calls.choose(start + more + RATE, MARKS), start + more

    async def propose(i: int) -> tuple[str, list[tuple[str, str, str]]]:
        start = task + _open(1, i)
        step = await calls.complete(start, STEP)
        return step, await asyncio.gather(*(elaborate(start + step + _open(2, j)) for j in range(ELABORATIONS)))

    proposals = await asyncio.gather(*(propose(i) for i in range(PROPOSALS)))
    leaves = [leaf for _, children in proposals for leaf in children]
    best = max(range(len(leaves)), key=lambda i: (MARKS.index(leaves[i][1]), -i))
    answer = await calls.complete(leaves[best][2] + "\nAnswer:", ANSWER)
    return [*(step for step, _ in proposals), *(leaf[0] for leaf in leaves), *(leaf[1] for leaf in leaves), answer]


PROGRAM = Program("tree", "tree of thought, 3 x 2, rated", cases, language, plain, size=2, fork_heavy=True)
