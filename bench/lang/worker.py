"""An engine in a process of its own that runs programs on command: phloem's through the language, or transformers'.

python -m bench.lang.worker engine|transformers|scoring {"model": ...}; a JSON object per line in, one out, as
bench.worker does. Used by `python -m bench.lang`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from bench.lang.minimum import CallLog, Note, least_prefill
from bench.lang.programs import PROGRAMS
from bench.lang.ways import Run, through_calls, through_language
from phloem import Engine

COUNTERS = ("prefill_tokens", "scored_tokens")
Way = Callable[..., Run]


def engine_options(model: str) -> dict[str, Any]:
    """Sections that the engine here and the server have in common. Weights are as transformers has them."""
    return {"model": {"path": model, "dtype": "float32"}, "cache": {"tokens": 16384}, "quant": {"use": "none"}}


def in_process(engine: Engine) -> Way:
    """The language on an engine of this process, with the least prefill of its calls beside the counters."""
    log = CallLog(engine)

    def run(name: str, size: int) -> Run:
        engine.flush_cache()
        log.notes.clear()
        before = engine.stats()
        done = through_language(name, size, engine)
        after = engine.stats()
        grew = {counter: after[counter] - before[counter] for counter in COUNTERS}
        return done._replace(counters={**grew, "least_prefill": least_prefill(log.notes), "calls": _calls(log.notes)})

    return run


def _calls(notes: Sequence[Note]) -> int:
    return sum(note.output is None for note in notes)


def unshared(model: str) -> Way:
    """Calls of transformers."""
    from bench.lang.unshared import UnsharedCalls  # imports transformers

    calls = UnsharedCalls(model)
    return lambda name, size: asyncio.run(through_calls(name, size, calls))


def scoring(engine: Engine) -> Way:
    """Scores choices on an engine of this process: all of a case as one tree, or one after another.

    Prompts are in the cache before the time starts, so what is compared is the scoring alone.
    """

    def run(name: str, size: int, together: bool) -> Run:
        cases = PROGRAMS[name].cases(size)
        engine.flush_cache()
        for case in cases:
            engine.score(case["text"], case["choices"][:1])
        begin = time.perf_counter()
        outputs = []
        for case in cases:
            text, choices = case["text"], case["choices"]
            if together:
                scores = engine.score(text, choices)
            else:
                scores = [engine.score(text, [choice])[0] for choice in choices]
            means = [sum(each) / len(each) for each in scores]
            outputs.append([choices[max(range(len(means)), key=means.__getitem__)]])
        return Run(time.perf_counter() - begin, outputs, {})

    return run


WAYS: dict[str, Callable[..., Way]] = {
    "engine": lambda model: in_process(Engine(**engine_options(model))),
    "scoring": lambda model: scoring(Engine(**engine_options(model))),
    "transformers": unshared,
}


def main() -> None:
    """Serve commands until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like; the pipe carries replies only
    begin = time.perf_counter()
    way = WAYS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps({"ready_s": time.perf_counter() - begin, "about": {}}), file=replies)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = way(**json.loads(line))._asdict()
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
