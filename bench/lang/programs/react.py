"""ReAct: thought, action, observation, three times over; the observation comes from a table."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import Prose
from bench.lang.programs._program import Calls, Case, Program

STEPS, THOUGHT, ARGUMENT = 3, 20, 8


def _example(prose: Prose) -> str:
    steps = "".join(
        f"Thought {i}: {prose.sentence()}\nAction {i}: Search[{prose.question()}]\n"
        f"Observation {i}: {prose.sentence()}\n"
        for i in range(1, STEPS + 1)
    )
    return f"Question: {prose.question()}\n{steps}Answer: {prose.sentence()}\n\n"


def cases(count: int) -> list[Case]:
    """Two solved examples for all; questions and observations of their own."""
    shots, prose = Prose("react shots"), Prose("react")
    header = "Solve a question with thoughts, actions and observations.\n\n" + _example(shots) + _example(shots)
    return [
        {
            "header": header,
            "question": f"Question: {prose.question()}\n",
            "observations": [prose.sentence() for _ in range(STEPS)],
        }
        for _ in range(count)
    ]


@pl.function
def language(s: pl.State, header: str, question: str, observations: list[str]) -> list[str]:
    """The same in the language."""
    written = []
    s += header
    s += question
    for i, observation in enumerate(observations, 1):
        s += f"Thought {i}:" + pl.gen("thought", max_tokens=THOUGHT, stop="\n")
        s += f"\nAction {i}: Search[" + pl.gen("argument", max_tokens=ARGUMENT, stop="]")
        written += [s["thought"], s["argument"]]
        s += f"]\nObservation {i}: {observation}\n"
    s += "Answer:" + pl.gen("answer", max_tokens=THOUGHT, stop="\n")
    return [*written, s["answer"]]


async def plain(calls: Calls, header: str, question: str, observations: list[str]) -> list[str]:
    """A call per thought and per action, one after another."""
    written = []
    text = header + question
    for i, observation in enumerate(observations, 1):
        text += f"Thought {i}:"
        thought = await calls.complete(text, THOUGHT, stop="\n")
        text += f"{thought}\nAction {i}: Search["
        argument = await calls.complete(text, ARGUMENT, stop="]")
        text += f"{argument}]\nObservation {i}: {observation}\n"
        written += [thought, argument]
    return [*written, await calls.complete(text + "Answer:", THOUGHT, stop="\n")]


PROGRAM = Program("react", "thought, action, observation x 3", cases, language, plain, size=4)
