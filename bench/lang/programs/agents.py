"""Generative agents: characters of one world rate three events beside each other, then plan, then speak."""

from __future__ import annotations

import asyncio

import phloem.lang as pl
from bench.lang.data import TOPICS, Prose
from bench.lang.programs._program import Calls, Case, Program

EVENTS, PLAN, SPEECH = 3, 24, 16
MARKS = [" little", " some", " much"]


def cases(count: int) -> list[Case]:
    """One world; characters, and events that each of them sees."""
    world = "The world: " + Prose("agents world").text(6) + "\n\n"
    prose = Prose("agents")
    return [
        {
            "world": world,
            "person": f"You are agent {i + 1} and think most about {TOPICS[i % len(TOPICS)]}. {prose.text(3)}\n",
            "events": [prose.sentence() for _ in range(EVENTS)],
        }
        for i in range(count)
    ]


def _rating(event: str) -> str:
    return f"Event: {event}\nHow much does it move you: little, some or much? It moves you"


def _seen(events: list[str]) -> str:
    return "You saw: " + " ".join(events) + "\nYour plan for the day:"


@pl.function
def language(s: pl.State, world: str, person: str, events: list[str]) -> list[str]:
    """The same in the language."""
    s += world
    s += person
    ratings = s.fork(len(events))
    ratings += lambda i: _rating(events[i]) + pl.select("mark", choices=MARKS)
    s += _seen(events) + pl.gen("plan", max_tokens=PLAN, ignore_eos=True)
    s += "\nYou say:" + pl.gen("speech", max_tokens=SPEECH, ignore_eos=True)
    return [*(branch["mark"] for branch in ratings), s["plan"], s["speech"]]


async def plain(calls: Calls, world: str, person: str, events: list[str]) -> list[str]:
    """Ratings and plan do not wait for each other; the speech follows the plan."""

    async def act() -> list[str]:
        text = world + person + _seen(events)
        plan = await calls.complete(text, PLAN)
        return [plan, await calls.complete(f"{text}{plan}\nYou say:", SPEECH)]

    ratings = (calls.choose(world + person + _rating(event), MARKS) for event in events)
    *marks, acts = await asyncio.gather(*ratings, act())
    return [*(str(mark) for mark in marks), *acts]


PROGRAM = Program("agents", "3 ratings beside a plan", cases, language, plain, size=3, fork_heavy=True)
