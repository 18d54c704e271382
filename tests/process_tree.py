"""Looks at the processes that an engine has started (Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path


def processes() -> dict[int, tuple[int, str, int]]:
    """All processes: parent, state, and CPU ticks used."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            table[int(entry.name)] = (int(words[1]), words[0], int(words[11]) + int(words[12]))
    return table


def descendants(of: int) -> dict[int, int]:
    """Processes below one, and their CPU ticks."""
    table, found = processes(), {of}
    while more := {pid for pid, (parent, *_) in table.items() if parent in found} - found:
        found |= more
    return {pid: table[pid][2] for pid in found - {of}}


def computing(of: int, others: Collection[int] = ()) -> list[int]:
    """Processes at work on a constraint: an engine's compile processes fork for each, and compute nothing else.

    `others` are children that are no compile processes: servers of other tests, say.
    """
    table = processes()
    own = {pid for pid, (parent, *_) in table.items() if parent == of} - set(others)
    return [pid for pid, (parent, state, _) in table.items() if parent in own and state == "R"]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def idle(of: int) -> bool:
    """Nothing below a process computes: no constraint is worked on, and half a second costs a tick of CPU at most."""
    if computing(of):
        return False
    before = descendants(of)
    time.sleep(0.5)
    return sum(descendants(of).values()) - sum(before.values()) <= 1
