"""Jump-forward in time: W6's schema (and ten more) with the drafter `grammar` against masks alone.

python -m bench.jump_time [MODEL] [--batch 1,16] [--rounds 3] [--documents 16] [--ten]

Both ways run in one engine, in turns: for masks alone, every request is told to use no drafter. Greedy, and the outputs
of both ways are asserted to be equal. `decode` is the time from each document's first token to its last; at batch 1 a
pair is a document, else a wave. A ratio above 1 says how many times faster the drafter makes it. Schemas are compiled
before. The drafter has seen other documents of W6's schema, as in a server, and none of the ten others'.
`tokens a pass` counts what a forward pass brought the whole batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from bench.jump import Job, jobs
from bench.pairs import in_turns, save, spread
from bench.waves import Call, Wave, fit, run_wave
from bench.workloads import load
from phloem import Engine, SamplingParams
from phloem.admission import Admission
from phloem.messages import GenerateCall
from phloem.request import Request

HEAD = (
    "| batch | schema | masks s | jump s | decode: masks / jump | wall: masks / jump | tokens | tokens a pass |\n"
    "|---|---|---|---|---|---|---|---|"
)
MEASURED = (1, 2, 3)  # variants of W6, each once
Pair = tuple[Wave, Wave]  # masks alone, jump-forward


class MasksAlone:
    """In place of an engine's admission: its requests get no drafts, as after a failure of each drafter."""

    def __init__(self, engine: Engine) -> None:
        self._parts = engine.core.parts
        self._admission = self._parts.admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admission, name)

    def requests(self, call: GenerateCall) -> list[Request]:
        """The engine's own requests for a call."""
        made = self._admission.requests(call)
        for request in made:
            request.drafters_off |= {name for name, _ in self._parts.drafting.drafters}
        return made


def masked(engine: Engine, calls: Sequence[Call], salt: str) -> Wave:
    """A run without drafts."""
    parts = engine.core.parts
    admission, parts.admission = parts.admission, cast(Admission, MasksAlone(engine))
    try:
        return run_wave(engine, calls, salt)
    finally:
        parts.admission = admission


def records(engine: Engine, variant: int, documents: int, tokens: int | None) -> list[Call]:
    """W6's requests."""
    data = load("W6g", variant)
    most = tokens or data["max_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=most, json_schema=data["schema"])
    return [Call(prompt, params) for prompt in fit(engine, data["prompts"][:documents])]


def pairs(engine: Engine, waves: Sequence[Sequence[Call]], salt: str) -> list[Pair]:
    """Each wave once both ways, the order alternating: a document that the drafter has seen is no measure of it."""
    done = in_turns(len(waves), lambda i: masked(engine, waves[i], salt), lambda i: run_wave(engine, waves[i], salt))
    for alone, jump in done:
        assert alone.outputs == jump.outputs, "jump-forward changed the output"
    return done


def w6(engine: Engine, batch: int, options: argparse.Namespace) -> list[Pair]:
    """W6 at a batch size, after other documents of its schema."""
    salt = f"batch {batch}"
    run_wave(engine, records(engine, 0, min(batch, options.documents), options.tokens), salt)
    variants = MEASURED[: options.rounds if batch > 1 else 1]
    calls = [records(engine, variant, options.documents, options.tokens) for variant in variants]
    return pairs(engine, [part[at : at + batch] for part in calls for at in range(0, len(part), batch)], salt)


def other(engine: Engine, job: Job, options: argparse.Namespace) -> list[Pair]:
    """A document of a schema that is compiled, and new to the drafter."""
    prompt = engine.tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt
    call = Call(prompt, job._replace(max_tokens=options.tokens or job.max_tokens).params)
    masked(engine, [call], job.name)
    return pairs(engine, [[call]], job.name)


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
    parser.add_argument("--rounds", type=int, default=3, help="waves of each batch above 1, at most 3")
    parser.add_argument("--documents", type=int, default=16, help="of W6")
    parser.add_argument("--tokens", type=int, help="at most, a document; default: what the workload says")
    parser.add_argument("--ten", action="store_true", help="the ten other schemas too, at batch 1")
    options = parser.parse_args(arguments)
    lines, kept = [HEAD], []
    with Engine(options.model, cache={"tokens": 8192}, grammar={"use": options.backend}) as engine:

        def done(batch: int, name: str, found: Sequence[Pair]) -> None:
            lines.append(row(batch, name, found))
            kept.append([batch, name, [[(wave.seconds, wave.decode_s) for wave in pair] for pair in found]])
            show("\n".join(lines[-1 - (len(lines) == 2) :]))

        for batch in map(int, options.batch.split(",")):
            done(batch, "W6", w6(engine, batch, options))
        ten = []
        for job in jobs()[1] if options.ten else []:
            ten += other(engine, job, options)
            done(1, job.name, ten[-1:])
        if ten:
            done(1, f"**the {len(ten)}**", ten)
    show(f"kept as {save('jump_time', chr(10).join(lines), options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
