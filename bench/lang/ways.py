"""Runs a program's cases together, in the language or as calls, and times it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from bench.lang.programs import PROGRAMS
from bench.lang.programs._program import Calls


class Run(NamedTuple):
    """One run of all cases: wall time, what each case wrote, and what the way counted, if it counts."""

    seconds: float
    outputs: list[list[str]]
    counters: dict[str, float]


def through_language(name: str, size: int, backend: Any) -> Run:
    """All cases as one batch. Raises the error of a case that failed."""
    program = PROGRAMS[name]
    cases = program.cases(size)
    begin = time.perf_counter()
    states = program.language.run_batch(cases, backend=backend, temperature=0, num_threads=len(cases))
    seconds = time.perf_counter() - begin
    for state in states:
        if state.error() is not None:
            raise state.error()
    return Run(seconds, [state.ret_value for state in states], {})


async def through_calls(name: str, size: int, calls: Calls) -> Run:
    """All cases at once, each a coroutine that makes its calls."""
    program = PROGRAMS[name]
    cases = program.cases(size)
    begin = time.perf_counter()
    outputs = await asyncio.gather(*(program.plain(calls, **case) for case in cases))
    return Run(time.perf_counter() - begin, list(outputs), {})
