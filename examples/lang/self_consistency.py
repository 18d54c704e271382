"""Self-consistency: several chains of thought are sampled from one prefix, and the majority of answers wins."""

from __future__ import annotations

from collections import Counter

from _backend import chosen_backend

import phloem.lang as pl

QUESTION = "A gardener has 12 seedlings and plants 3 in each bed. 2 beds are left empty. How many beds are there?"


@pl.function
def solve(s, question, chains):
    s += "Question: A tree has 4 branches with 5 leaves each. 3 leaves fall. How many are left?\n"
    s += "Reasoning: 4 times 5 is 20. 20 minus 3 is 17.\nAnswer: 17\n\n"
    s += f"Question: {question}\nReasoning:"
    branches = s.fork(chains)
    branches += pl.gen("reasoning", stop="\n", temperature=0.8)
    branches += "\nAnswer: " + pl.gen("answer", regex="[0-9]{1,2}", temperature=0)
    branches.join()


def main(max_tokens: int = 32, chains: int = 5) -> tuple[str, list[str]]:
    """The most frequent answer, and all of them."""
    state = solve.run(QUESTION, chains, max_new_tokens=max_tokens)
    answers = state["answer"]
    return Counter(answers).most_common(1)[0][0], answers


if __name__ == "__main__":
    with chosen_backend():
        winner, answers = main()
        print(f"{winner} (of {', '.join(answers)})")
