"""Two ways of doing the same, in turns: so a machine that slows down hits both alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from bench.report import quartiles
from phloem.plugins.command._machine import describe

RESULTS = Path(__file__).parent / "results"
A = TypeVar("A")
B = TypeVar("B")


def in_turns(rounds: int, first: Callable[[int], A], second: Callable[[int], B]) -> list[tuple[A, B]]:
    """Results of both by round, from 0. Every other round the second goes first."""
    done = []
    for number in range(rounds):
        if number % 2:
            b = second(number)
            done.append((first(number), b))
        else:
            a = first(number)
            done.append((a, second(number)))
    return done


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, and the quartiles in brackets."""
    low, middle, high = (format(value, form) for value in quartiles(values))
    return f"{middle} ({low} to {high}, n={len(values)})"


def save(name: str, text: str, **report: Any) -> Path:
    """Keep a run as JSON in the results folder, with the machine and the printed text. Returns where."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{re.sub('[^0-9T]', '', now[:19])}.json"
    path.write_text(json.dumps({"when": now, "machine": describe(), "text": text, **report}, indent=1))
    return path
