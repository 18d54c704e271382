"""A conversation of two turns. Roles put the messages into the model's chat format.

The second turn runs only its own tokens: everything before is in the engine's tree.
"""

from __future__ import annotations

from _backend import chosen_backend

import phloem.lang as pl


@pl.function
def two_turns(s, first, second):
    s += pl.system("You are a helpful assistant who answers in one sentence.")
    s += pl.user(first)
    s += pl.assistant(pl.gen("answer_1"))
    s += pl.user(second)
    s += pl.assistant(pl.gen("answer_2"))


def main(max_tokens: int = 48) -> list[dict[str, str]]:
    """The messages: system, user, assistant, user, assistant."""
    state = two_turns.run(
        first="What does the phloem of a tree carry?",
        second="And what does the xylem carry?",
        temperature=0,
        max_new_tokens=max_tokens,
    )
    return state.messages()


if __name__ == "__main__":
    with chosen_backend():
        for message in main():
            print(f"{message['role']}: {message['content']}")
