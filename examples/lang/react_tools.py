"""ReAct: the model thinks, calls a tool, reads what came back, and goes on until it finishes.

The tools are plain Python functions. What the model may write between them is held to a list of choices or to a
regular expression, so that every call can be carried out.
"""

from __future__ import annotations

import operator

from _backend import chosen_backend

import phloem.lang as pl

HEIGHTS = {"beech": 40, "birch": 25, "oak": 35, "redwood": 115, "spruce": 50}  # metres
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXAMPLE = """Answer questions with the tools height[tree] and calculate[expression].

Question: How much taller is a spruce than a birch?
Thought: I need both heights.
Action: height[spruce]
Observation: 50
Thought: Now the other one.
Action: height[birch]
Observation: 25
Thought: The difference is left.
Action: calculate[50 - 25]
Observation: 25
Thought: That is the answer.
Action: finish[25]

"""


def calculate(expression: str) -> int:
    """The value of two numbers with an operator between them."""
    left, sign, right = expression.split()
    return OPERATIONS[sign](int(left), int(right))


@pl.function
def react(s, question, steps):
    s += EXAMPLE + f"Question: {question}\n"
    for _ in range(steps):
        s += "Thought:" + pl.gen("thought", stop="\n") + "\nAction: "
        s += pl.select("tool", choices=["height", "calculate", "finish"]) + "["
        if s["tool"] == "height":
            s += pl.select("argument", choices=sorted(HEIGHTS))
            observation = HEIGHTS[s["argument"]]
        elif s["tool"] == "calculate":
            s += pl.gen("argument", regex=r"[1-9][0-9]{0,2} [-+*] [1-9][0-9]{0,2}")
            observation = calculate(s["argument"])
        else:
            s += pl.gen("argument", regex="[0-9]{1,4}") + "]\n"
            return s["argument"]
        s += f"]\nObservation: {observation}\n"
    return None  # out of steps


def main(max_tokens: int = 24, steps: int = 4) -> tuple[str, list[str]]:
    """The whole text after the question, and the lines that call tools."""
    state = react.run("How much taller is a redwood than an oak?", steps, temperature=0, max_new_tokens=max_tokens)
    text = state.text().removeprefix(EXAMPLE)
    return text, [line for line in text.splitlines() if line.startswith("Action: ")]


if __name__ == "__main__":
    with chosen_backend():
        print(main()[0])
