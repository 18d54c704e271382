"""Generative agents: characters with memories perceive events, rate them, and decide what to do next.

Each agent is one program run per tick; all agents of a tick run side by side. What an agent knows grows at its end, so
the next tick finds all earlier ones in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from _backend import chosen_backend

import phloem.lang as pl

EVENTS = ["It starts to rain.", "A stranger asks for the way to the mill."]
ACTIONS = ["work", "rest", "talk to somebody", "go home"]


@dataclass
class Agent:
    """Somebody of the village."""

    name: str
    trade: str
    memory: str = ""
    log: list[tuple[int, str]] = field(default_factory=list)  # per tick how much it mattered, and what was done


@pl.function
def tick(s, name, trade, memory, event):
    s += f"{name} is the {trade} of a small village.\n{memory}"
    with s.var_scope("seen"):
        s += f"Event: {event}\n"
        rating = s.fork(1)  # beside the story: the number is for the program, not for the memory
        question = f"How much does this matter to {name}, from 1 (not at all) to 9? "
        rating += question + pl.select("weight", choices=[str(number) for number in range(1, 10)])
        s += f"{name} decides to " + pl.select("action", choices=ACTIONS) + " because" + pl.gen("reason", stop="\n")
        s += "\n"
    s["weight"] = rating[0]["weight"]


def main(max_tokens: int = 24) -> list[Agent]:
    """The agents after all events."""
    agents = [Agent("Ada", "baker"), Agent("Ben", "forester"), Agent("Cleo", "teacher")]
    for event in EVENTS:
        arguments = [{"name": a.name, "trade": a.trade, "memory": a.memory, "event": event} for a in agents]
        states = tick.run_batch(arguments, temperature=0, max_new_tokens=max_tokens)
        for agent, state in zip(agents, states, strict=True):
            agent.memory += state["seen"]
            agent.log.append((int(state["weight"]), state["action"]))
    return agents


if __name__ == "__main__":
    with chosen_backend():
        for agent in main():
            print(f"{agent.name}: {agent.log}\n{agent.memory}")
