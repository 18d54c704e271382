"""Jump-forward in time: W6's schema (and ten more) with the drafter `grammar` against masks alone.

python -m bench.jump_time [MODEL] [--batch 1,16] [--rounds 3] [--documents 16] [--ten]

Both ways run in one engine, in turns: for masks alone, every request is told to use no drafter. Greedy, and the outputs
of both ways are asserted to be equal. `decode` is the time from each document's first token to its last; at batch 1 a
pair is a document, else a wave. A ratio above 1 says how many times faster the drafter makes it. One untimed run
of each document comes first: schemas are compiled then, and the drafter has seen them once, as in a server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import cast

from bench.jump import Job, jobs
from bench.pairs import in_turns, save, spread
from bench.waves import Call, Wave, fit, run_wave
from phloem import Engine
from phloem.admission import Admission
from phloem.messages import GenerateCall
from phloem.request import Request

HEAD = (
    "| batch | schema | masks s | jump s | decode: masks / jump | wall: masks / jump | tokens | tokens a pass |\n"
    "|---|---|---|---|---|---|---|---|"
)
Pair = tuple[Wave, Wave]  # masks alone, jump-forward


class MasksAlone:
    """In place of an engine's admission: its requests get no drafts, as after a failure of each drafter."""

    def __init__(self, engine: Engine) -> None:
        self._parts = engine.core.parts
        self._admission = self._parts.admission

    def requests(self, call: GenerateCall) -> list[Request]:
        """The engine's own requests for a call."""
        made = self._admission.requests(call)
        for request in made:
            request.drafters_off |= {name for name, _ in self._parts.drafting.drafters}
        return made


def masked(engine: Engine, calls: Sequence[Call]) -> Wave:
    """A run without drafts."""
    parts = engine.core.parts
    admission, parts.admission = parts.admission, cast(Admission, MasksAlone(engine))
    try:
        return run_wave(engine, calls)
    finally:
        parts.admission = admission


def pairs(engine: Engine, work: Sequence[Job], batch: int, rounds: int) -> list[Pair]:
    """Runs of both ways of all documents, `batch` at a time."""
    encode = engine.tokenizer.encode
    prompts = fit(engine, [encode(job.prompt) if isinstance(job.prompt, str) else job.prompt for job in work])
    calls = [Call(prompt, job.params) for prompt, job in zip(prompts, work, strict=True)]
    waves = [calls[at : at + batch] for at in range(0, len(calls), batch)]
    for wave in waves:
        run_wave(engine, wave)
    done: list[Pair] = []
    for wave in waves:
        done += in_turns(rounds, lambda _, w=wave: masked(engine, w), lambda _, w=wave: run_wave(engine, w))  # type: ignore[misc]
    for alone, jump in done:
        assert alone.outputs == jump.outputs, "jump-forward changed the output"
    return done


def row(batch: int, name: str, found: Sequence[Pair]) -> str:
    """A line of the table."""
    alone, jump = (sum(pair[i].decode_s for pair in found) for i in (0, 1))
    decode = spread([a.decode_s / b.decode_s for a, b in found], ".2f")
    wall = spread([a.seconds / b.seconds for a, b in found], ".2f")
    tokens = sum(len(ids) for _, wave in found for ids in wave.outputs)
    each = tokens / sum(wave.grew["steps"] for _, wave in found)
    return f"| {batch} | {name} | {alone:.2f} | {jump:.2f} | {decode} | {wall} | {tokens} | {each:.2f} |"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--batch", default="1,16", help="documents together, one table row each")
    parser.add_argument("--rounds", type=int, default=3, help="of batches; of single documents one round is run")
    parser.add_argument("--documents", type=int, default=16, help="of W6")
    parser.add_argument("--tokens", type=int, help="at most, a document; default: what the workload says")
    parser.add_argument("--ten", action="store_true", help="the ten other schemas too, at batch 1")
    options = parser.parse_args(arguments)
    first, ten = (
        [job._replace(max_tokens=options.tokens or job.max_tokens) for job in group]
        for group in jobs(options.documents)
    )
    lines, kept = [HEAD], []
    with Engine(options.model, cache={"tokens": 8192}, grammar={"use": options.backend}) as engine:
        work = [(int(batch), "W6", first) for batch in options.batch.split(",")]
        work += [(1, job.name, [job]) for job in ten] if options.ten else []
        for batch, name, group in work:
            found = pairs(engine, group, batch, 1 if batch == 1 and name == "W6" else options.rounds)
            lines.append(row(batch, name, found))
            kept += [[batch, name, *((wave.seconds, wave.decode_s) for wave in pair)] for pair in found]
            show("\n".join(lines[-1 - (len(lines) == 2) :]))
    show(f"kept as {save('jump_time', chr(10).join(lines), options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
