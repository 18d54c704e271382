"""Skeleton of thought: first the points of an answer, then all points are written out side by side."""

from __future__ import annotations

from _backend import chosen_backend

import phloem.lang as pl

POINTS = 3
POINT = "[A-Z][a-z]+( [a-z]+){1,4}"


@pl.function
def answer(s, question):
    s += pl.user(f"{question} Give {POINTS} points of two to five words each.")
    with s.assistant():
        for number in range(1, POINTS + 1):
            s += f"{number}. " + pl.gen(f"point_{number}", regex=POINT) + "\n"
    branches = s.fork(POINTS)
    branches += lambda i: pl.user(f"Write one or two sentences about point {i + 1}.")
    branches += pl.assistant(pl.gen("text"))
    branches.join()  # the variables that the branches have set become lists in `s`


def main(max_tokens: int = 40) -> list[tuple[str, str]]:
    """Point and text, in order."""
    state = answer.run("Why do trees lose their leaves?", temperature=0, max_new_tokens=max_tokens)
    return [(state[f"point_{i + 1}"], text) for i, text in enumerate(state["text"])]


if __name__ == "__main__":
    with chosen_backend():
        for point, text in main():
            print(f"{point}: {text}\n")
