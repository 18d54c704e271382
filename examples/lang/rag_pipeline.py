"""Retrieval-augmented generation: write a query, find passages, write an answer from them, choose its source."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

from _backend import chosen_backend

import phloem.lang as pl

PASSAGES: dict[str, str] = json.loads((Path(__file__).parent / "data" / "trees.json").read_text())


def words(text: str) -> Counter[str]:
    """Lower-case words of a text, counted."""
    return Counter(re.findall(r"[a-z]+", text.lower()))


def retrieve(query: str, count: int) -> list[str]:
    """Titles of the passages that share the rarest words with the query, best first."""
    texts = {title: words(f"{title} {text}") for title, text in PASSAGES.items()}

    def rarity(word: str) -> float:
        return math.log(len(texts) / (1 + sum(word in found for found in texts.values())) + 1)

    def score(title: str) -> float:
        return sum(rarity(word) for word in words(query) if word in texts[title])

    return sorted(texts, key=lambda title: (-score(title), title))[:count]


@pl.function
def answer(s, question, passages):
    query = s.fork(1)
    query += f"Question: {question}\nWords to search for:" + pl.gen("query", stop="\n", max_tokens=12)
    titles = retrieve(f"{question} {query[0]['query']}", passages)

    for title in titles:
        s += f"[{title}] {PASSAGES[title]}\n"
    s += f"\nQuestion: {question}\nAnswer in one sentence:" + pl.gen("answer", stop="\n")
    s += "\nSource: [" + pl.select("source", choices=titles) + "]\n"
    return titles


def main(max_tokens: int = 32, passages: int = 3) -> dict[str, object]:
    """The answer, its source, and the titles that were found."""
    state = answer.run(
        "What makes the rings in the wood of a tree?", passages, temperature=0, max_new_tokens=max_tokens
    )
    return {"answer": state["answer"].strip(), "source": state["source"], "found": state.ret_value}


if __name__ == "__main__":
    with chosen_backend():
        for name, value in main().items():
            print(f"{name}: {value}")
