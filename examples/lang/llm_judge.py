"""Branch, solve, merge: an essay is judged on several dimensions at once, and the judgements make one grade."""

from __future__ import annotations

from _backend import chosen_backend

import phloem.lang as pl

ESSAY = (
    "A forest is not a crowd of trees. Below the ground threads of fungi tie root to root, and sugar made in one "
    "crown may end in the roots of a neighbour. Some call it a market, some a family. Both words say more about us "
    "than about trees. What is certain is that no tree of a forest stands alone, and that a forester who counts "
    "trunks has counted the least of it."
)
DIMENSIONS = ("Clarity", "Originality", "Evidence", "Style")
GRADES = ["A", "B", "C", "D", "E"]


@pl.function
def judge(s, essay):
    s += pl.system("You judge essays fairly and briefly.")
    s += pl.user("Here is an essay.\n\n" + essay)
    branches = s.fork(len(DIMENSIONS))
    branches += lambda i: pl.user(f"Judge its {DIMENSIONS[i].lower()} in one sentence.")
    branches += pl.assistant("Judgement: " + pl.gen("judgement", stop="\n"))

    lines = [f"{name}: {branch['judgement']}" for name, branch in zip(DIMENSIONS, branches, strict=True)]
    s += pl.user("Others have said:\n" + "\n".join(lines) + "\nGive a grade from A (best) to E.")
    s += pl.assistant("Grade: " + pl.select("grade", choices=GRADES))
    return lines


def main(max_tokens: int = 32) -> tuple[list[str], str]:
    """A judgement per dimension, in order, and the grade."""
    state = judge.run(ESSAY, temperature=0, max_new_tokens=max_tokens)
    return state.ret_value, state["grade"]


if __name__ == "__main__":
    with chosen_backend():
        lines, grade = main()
        print("\n".join([*lines, f"Grade: {grade}"]))
