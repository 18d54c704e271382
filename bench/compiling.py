"""One schema compiled once and shared, against compiling it for every request.

python -m bench.compiling [MODEL] [--requests 32] [--rounds 3] [--schema W6] [--tokens 96]

All requests come at once and write the same documents. For `shared` their schemas are equal; for `each` they differ in
their title, which changes nothing but the key they are kept under. Every round's schemas are new, so `shared` compiles
once a round. The two follow each other in one engine, the order alternating; the compile process is started before.
`compile CPU s` is what the compile process and its children used of the processor (Linux).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.pairs import in_turns, save, spread
from bench.waves import Call, Wave, fit, run_wave
from bench.workloads import load
from phloem import Engine, SamplingParams

SCHEMAS = Path(__file__).parent / "schemas"
Measured = tuple[Wave, float, int]  # with CPU seconds of compiling, and how often


class Rounds:
    """Waves of one workload, every one with schemas that the engine has not seen."""

    def __init__(self, engine: Engine, schema: str, requests: int, max_tokens: int) -> None:
        self._engine, self._tokens = engine, max_tokens
        prompts = fit(engine, load("W6g", 1)["prompts"])
        self._prompts = list(itertools.islice(itertools.cycle(prompts), requests))
        named = SCHEMAS / f"{schema}.json"
        self._schema = json.loads(named.read_text())["schema"] if named.exists() else load("W6g", 1)["schema"]
        self._titles = itertools.count()

    def _compile_cpu(self) -> float:
        """CPU seconds of the compile process so far, with the children it has waited for; there is one process."""
        compilers = self._engine.core.parts.grammars._compilers
        assert compilers is not None, "the engine has a grammar backend"
        started = compilers._workers[0]._process._popen
        if started is None:
            return 0.0
        words = Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")

    def wave(self, titles: int) -> Measured:
        """All requests, with so many different schemas among them."""
        schemas = [{**self._schema, "title": f"record {next(self._titles)}"} for _ in range(titles)]
        params = [SamplingParams(temperature=0.0, max_tokens=self._tokens, json_schema=one) for one in schemas]
        before, used = self._engine.stats()["grammar"]["compiled"], self._compile_cpu()
        wave = run_wave(self._engine, [Call(*pair) for pair in zip(self._prompts, itertools.cycle(params))])
        return wave, self._compile_cpu() - used, self._engine.stats()["grammar"]["compiled"] - before

    def shared(self, _: int) -> Measured:
        """One schema for all."""
        return self.wave(1)

    def each(self, _: int) -> Measured:
        """A schema of its own for every request."""
        return self.wave(len(self._prompts))


def table(runs: Sequence[tuple[Measured, Measured]]) -> str:
    """Both ways, and the ratio of their times to the last finish."""
    lines = ["| schemas | to last finish s | compiled a run | compile CPU s |", "|---|---|---|---|"]
    for name, found in zip(("shared", "each"), zip(*runs, strict=True), strict=True):
        seconds = spread([wave.seconds for wave, _, _ in found], ".2f")
        compiled = spread([spent for _, spent, _ in found], ".3f")
        lines.append(f"| {name} | {seconds} | {found[0][2]} | {compiled} |")
    ratio = spread([each[0].seconds / shared[0].seconds for shared, each in runs], ".2f")
    return "\n".join([*lines, "", f"compiling for each / sharing: **{ratio}** times the time to the last finish"])


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="at most, a document")
    names = ["W6", *(path.stem for path in sorted(SCHEMAS.glob("*.json")))]
    parser.add_argument("--schema", default="W6", choices=names, help="W6's, or one in bench/schemas")
    options = parser.parse_args(arguments)
    sections: dict[str, Any] = {"cache": {"tokens": 16384}, "grammar": {"use": options.backend}}
    with Engine(options.model, **sections) as engine:
        rounds = Rounds(engine, options.schema, options.requests, options.tokens)
        rounds.shared(0)
        runs = in_turns(options.rounds, rounds.shared, rounds.each)
    text = table(runs)
    show(text)
    kept = [[(wave.seconds, spent, compiled) for wave, spent, compiled in pair] for pair in runs]
    show(f"kept as {save('compiling', text, options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
