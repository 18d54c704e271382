"""Conversations of four turns, with short answers and with long ones."""

from __future__ import annotations

import phloem.lang as pl
from bench.lang.data import Prose
from bench.lang.programs._program import Calls, Case, Messages, Program

TURNS, SHORT, LONG = 4, 8, 48


def cases(count: int, answer: int) -> list[Case]:
    """A system message for all; what the user says, turn by turn."""
    system = "You answer briefly. " + Prose("chat system").text(3)
    prose = Prose("chat")
    return [
        {
            "system": system,
            "turns": [f"{prose.text(2)} {prose.question()}" for _ in range(TURNS)],
            "answer": answer,
        }
        for _ in range(count)
    ]


@pl.function
def language(s: pl.State, system: str, turns: list[str], answer: int) -> list[str]:
    """The same in the language."""
    s += pl.system(system)
    for i, turn in enumerate(turns):
        s += pl.user(turn)
        s += pl.assistant(pl.gen(f"answer_{i}", max_tokens=answer, ignore_eos=True))
    return [s[f"answer_{i}"] for i in range(len(turns))]


async def plain(calls: Calls, system: str, turns: list[str], answer: int) -> list[str]:
    """A call per turn with all messages so far."""
    messages: Messages = [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": await calls.complete(list(messages), answer)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def short(count: int) -> list[Case]:
    """Few tokens an answer."""
    return cases(count, SHORT)


def long(count: int) -> list[Case]:
    """Many tokens an answer."""
    return cases(count, LONG)


PROGRAMS = (
    Program("chat-short", f"{TURNS} turns, {SHORT} tokens each", short, language, plain, size=6),
    Program("chat-long", f"{TURNS} turns, {LONG} tokens each", long, language, plain, size=6),
)
