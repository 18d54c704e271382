"""A character sheet by regular expression: free fields, choices and numbers in a fixed layout that is JSON."""

from __future__ import annotations

import json

from _backend import chosen_backend

import phloem.lang as pl

WORDS = "[A-Z][a-z]{2,9}( [a-z]{2,9}){0,2}"
SHEET = (
    r"\{\n"
    rf'  "name": "{WORDS}",\n'
    r'  "folk": "(dryad|faun|gnome|human)",\n'
    rf'  "trade": "{WORDS}",\n'
    r'  "strength": [1-9],\n'
    r'  "wisdom": [1-9],\n'
    r'  "alive": (true|false)\n'
    r"\}"
)


@pl.function
def character(s, place):
    s += f"A character of a tale that is set in {place}, as JSON:\n"
    s += pl.gen("sheet", regex=SHEET)


def main(max_tokens: int = 96) -> dict[str, object]:
    """The sheet, parsed."""
    state = character.run("a forest that remembers", temperature=0, max_new_tokens=max_tokens)
    return json.loads(state["sheet"])


if __name__ == "__main__":
    with chosen_backend():
        print(json.dumps(main(), indent=2))
