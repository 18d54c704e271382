"""Tree of thought: at each level every state forks into proposals, a select rates them, and the best go on.

All branches of a level run in one batch, and each shares what its ancestors have computed.
"""

from __future__ import annotations

from _backend import chosen_backend

import phloem.lang as pl

TASK = "Plan how to move a full-grown apple tree to another garden."
MARKS = ["1", "2", "3", "4", "5"]


@pl.function
def tree(s, task, depth, branches, keep):
    s += f"Task: {task}\nSolve it step by step. Each step is one sentence.\n"
    frontier = [s]
    for level in range(1, depth + 1):
        proposals = []
        for state in frontier:
            children = state.fork(branches)
            children += f"Step {level}:" + pl.gen(f"step_{level}", stop=["\n", "."], temperature=0.9)
            for child in children:
                rating = child.fork(1)  # so that the rating does not become part of the plan
                rating += "\nHow useful is this step, from 1 to 5? " + pl.select("mark", choices=MARKS)
                proposals.append((child, rating[0]))
        ranked = sorted(proposals, key=lambda pair: int(pair[1]["mark"]), reverse=True)
        frontier = [child for child, _ in ranked[:keep]]
        for child in frontier:
            child += ".\n"
    return [(state[f"step_{depth}"], state.text()) for state in frontier]


def main(max_tokens: int = 24, depth: int = 2, branches: int = 3, keep: int = 2) -> list[tuple[str, str]]:
    """The kept plans, best first: the last step of each, and its whole text."""
    state = tree.run(TASK, depth, branches, keep, max_new_tokens=max_tokens)
    return state.ret_value


if __name__ == "__main__":
    with chosen_backend():
        for number, (_, text) in enumerate(main(), 1):
            print(f"--- plan {number}\n{text}")
