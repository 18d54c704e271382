"""Drafts looked up in the text beside llama.cpp's: both engines with and without, on the prompts of bench.drafting.

python -m bench.lookup GGUF [--binary llama-server] [--spec suffix,ngram] [--theirs ngram-mod,ngram-simple]

One stream, greedy. GGUF is what both load: a float32 file for equal precision. A round is one prompt through every way,
each way first in its turn, nothing of it cached before. Texts end where the model ends them. Tokens per second include
the prompt; ratios are taken within a round: medians with quartiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench.drafting import SETS, waves
from bench.jump_time import masked
from bench.pairs import save, spread
from bench.peers import llama_server
from bench.waves import Call, run_wave
from phloem import Engine

HEAD = (
    "| set | engine | drafts | tok/s | over the engine without | over llama.cpp's best of the round | same text |\n"
    "|---|---|---|---|---|---|---|"
)
PORT = 18090


class Run(NamedTuple):
    """One prompt, one way."""

    rate: float  # tokens per second
    tokens: list[int]


Way = Callable[[Call, str], Run]
Name = tuple[str, str]  # engine, drafts


def ours(engine: Engine, drafted: bool) -> Way:
    """Through phloem, with the engine's drafter or without."""

    def run(call: Call, salt: str) -> Run:
        wave = run_wave(engine, [call], salt) if drafted else masked(engine, [call], salt)
        return Run(len(wave.outputs[0]) / wave.seconds, wave.outputs[0])

    return run


def theirs(server: llama_server.LlamaServer) -> Way:
    """Through llama.cpp's server."""

    def run(call: Call, salt: str) -> Run:
        begin = time.perf_counter()
        tokens = server.generate([call.prompt], call.params.max_tokens or 128)[0]
        return Run(len(tokens) / (time.perf_counter() - begin), tokens)

    return run


def measure(ways: dict[Name, Way], calls: Sequence[Call], salt: str) -> dict[Name, list[Run]]:
    """Every call through every way, the order moving on by one each round."""
    runs: dict[Name, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for number, call in enumerate(calls):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(ways[name](call, f"{salt}/{number}/{'/'.join(name)}"))
    return runs


def rows(set_name: str, runs: dict[Name, list[Run]]) -> list[str]:
    """Lines of the table, one a way."""
    best = [max(pair) for pair in zip(*rates(runs, "llama.cpp"), strict=True)]
    lines = []
    for (engine, drafts), found in runs.items():
        alone, own = runs[engine, "none"], [run.rate for run in found]
        same = sum(a.tokens == b.tokens for a, b in zip(found, runs["phloem", "none"], strict=True))
        cells = [
            set_name, engine, drafts, spread(own, ".1f"),
            spread([a / b.rate for a, b in zip(own, alone, strict=True)], ".2f"),
            spread([a / b for a, b in zip(own, best, strict=True)], ".2f"),
            f"{same} of {len(found)}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rates(runs: dict[Name, list[Run]], engine: str) -> list[list[float]]:
    """Tokens per second of each of an engine's ways, by round."""
    return [[run.rate for run in found] for name, found in runs.items() if name[0] == engine]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--binary", default="llama-server")
    parser.add_argument("--spec", default="suffix,ngram", help="phloem's drafters, an engine for each")
    parser.add_argument("--theirs", default="ngram-mod,ngram-simple", help="llama.cpp's, a server for each")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print line by line, and keep the results."""
    options = parse(arguments)
    ways: dict[Name, Way] = {}
    lines, kept = [HEAD], []
    show(HEAD)
    with ExitStack() as open_ones:
        for spec in options.spec.split(","):
            sections = {"grammar": "none", "spec": [{"use": spec}], "cache": {"tokens": 4096}}
            engine = open_ones.enter_context(Engine(options.gguf, **sections))
            ways.setdefault(("phloem", "none"), ours(engine, drafted=False))
            ways["phloem", spec] = ours(engine, drafted=True)
        for number, spec in enumerate(["none", *options.theirs.split(",")]):
            server = llama_server.connect(
                options.gguf, options.binary, slots=1, port=PORT + number, share=False, spec=spec, ends=True
            )
            open_ones.callback(server.close)
            ways["llama.cpp", spec] = theirs(server)
        for name in options.sets.split(","):
            calls = waves(engine, name, 1, options.pairs, {"temperature": 0.0, "max_tokens": options.tokens})
            runs = measure(ways, [wave[0] for wave in calls], name)
            for line in rows(name, runs):
                lines.append(line)
                show(line)
            kept.append([name, [[*way, [run.rate for run in found]] for way, found in runs.items()]])
    show(f"kept as {save('lookup', chr(10).join(lines), options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
