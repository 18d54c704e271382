"""Texts become objects: a pydantic class is the schema, a mask holds every answer to it."""

from __future__ import annotations

import json

from _backend import chosen_backend
from pydantic import BaseModel, Field

import phloem.lang as pl

NOTES = [
    "The old oak by the church is about 300 years old and 28 metres high. It is healthy.",
    "Planted in 1990, the ginkgo at the station has reached 12 metres. A branch was broken by the storm.",
    "The two linden trees of the school yard, both 60 years old, were measured at 19 metres. No damage was found.",
]


class Tree(BaseModel):
    """What is wanted of a note."""

    kind: str = Field(max_length=12)
    height_m: int = Field(ge=1, le=120)
    damaged: bool


@pl.function
def extract(s, note):
    s += f"Note: {note}\nThe tree as JSON: "
    s += pl.gen("tree", json_schema=json.dumps(Tree.model_json_schema()))


def main(max_tokens: int = 48) -> list[Tree]:
    """A validated object per note, in order."""
    states = extract.run_batch([{"note": note} for note in NOTES], temperature=0, max_new_tokens=max_tokens)
    return [Tree.model_validate_json(state["tree"]) for state in states]


if __name__ == "__main__":
    with chosen_backend():
        for tree in main():
            print(tree)
