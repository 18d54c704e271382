"""Few-shot prompting over a batch: all questions share the examples, which are computed once."""

from __future__ import annotations

from _backend import chosen_backend

import phloem.lang as pl

EXAMPLES = [
    ("oak", "a tree", "acorns"),
    ("apple", "a tree", "apples"),
    ("strawberry", "an herb", "strawberries"),
    ("raspberry", "a shrub", "raspberries"),
]
PLANTS = ["pear", "hazel", "tomato", "blueberry"]


@pl.function
def what_grows(s, plant):
    for name, kind, fruit in EXAMPLES:
        s += f"Plant: {name}\nKind: {kind}\nBears: {fruit}\n\n"
    s += f"Plant: {plant}\nKind: " + pl.select("kind", choices=["a tree", "a shrub", "an herb"])
    s += "\nBears:" + pl.gen("fruit", stop="\n")


def main(max_tokens: int = 8) -> list[tuple[str, str, str]]:
    """Per plant, in order: its name, its kind, and what it bears."""
    states = what_grows.run_batch([{"plant": plant} for plant in PLANTS], temperature=0, max_new_tokens=max_tokens)
    return [(plant, s["kind"], s["fruit"].strip()) for plant, s in zip(PLANTS, states, strict=True)]


if __name__ == "__main__":
    with chosen_backend():
        for plant, kind, fruit in main():
            print(f"{plant}: {kind}, bears {fruit}")
