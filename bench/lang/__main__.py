"""Programs in the language beside the same programs as independent calls, and as transformers without sharing.

python -m bench.lang [--program tree,judge] [--size N] [--rounds R] [--ways engine,server,calls,transformers]

Four ways: `engine` is the language on an engine in a process of its own, `server` the language on a phloem server,
`calls` the official OpenAI client on the same server with as many programs at once, and `transformers` pads whole
prompts into batches. The rounds of a program are interleaved, each way begins with an empty cache, and one small
untimed run comes first. Everything is greedy. For `select8` its choices are also scored by an engine directly, as one
tree and one after another, with the prompts cached.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.lang.api_calls import ApiCalls
from bench.lang.programs import PROGRAMS
from bench.lang.server import Server
from bench.lang.table import Found, markdown
from bench.lang.ways import Run, through_calls, through_language
from bench.lang.worker import engine_options
from bench.pairs import save
from bench.process import PeerSpec, Worker

WAYS = ("engine", "server", "calls", "transformers")
OF_SELECT = ("one-tree", "one-by-one")  # run beside the others for select8
Way = Callable[[str, int], Run]


def in_worker(stack: ExitStack, kind: str, model: str) -> Callable[..., Run]:
    """What a process of its own runs."""
    worker = Worker(PeerSpec(kind, options={"model": model}), "bench.lang.worker")
    stack.callback(worker.close)
    return lambda name, size, **more: Run(**worker.ask(name=name, size=size, **more))


def on_server(stack: ExitStack, model: str) -> dict[str, Way]:
    """The two ways that share a server."""
    import phloem.lang as pl

    server = stack.enter_context(Server(engine_options(model)))
    runner = stack.enter_context(asyncio.Runner())
    calls, endpoint = ApiCalls(server.url, server.model), pl.RuntimeEndpoint(server.url)
    stack.callback(lambda: runner.run(calls.aclose()))

    def counted(run: Way) -> Way:
        def way(name: str, size: int) -> Run:
            server.flush()
            before = server.counters()
            done = run(name, size)
            return done._replace(counters={key: after - before[key] for key, after in server.counters().items()})

        return way

    return {
        "server": counted(lambda name, size: through_language(name, size, endpoint)),
        "calls": counted(lambda name, size: runner.run(through_calls(name, size, calls))),
    }


def open_ways(stack: ExitStack, options: argparse.Namespace, names: Sequence[str]) -> dict[str, Way]:
    """What was asked for, by name, each ready to run."""
    wanted = options.ways.split(",")
    unknown = set(wanted) - set(WAYS)
    if unknown:
        raise SystemExit(f"unknown ways: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    ways: dict[str, Way] = {}
    if "engine" in wanted:
        ways["engine"] = in_worker(stack, "engine", options.model)
    if {"server", "calls"} & set(wanted):
        shared = on_server(stack, options.model)
        ways |= {name: shared[name] for name in ("server", "calls") if name in wanted}
    if "transformers" in wanted:
        ways["transformers"] = in_worker(stack, "transformers", options.model)
    if "select8" in names and "engine" in wanted:
        score = in_worker(stack, "scoring", options.model)
        ways |= {way: partial(score, together=way == OF_SELECT[0]) for way in OF_SELECT}
    return ways


def measure(name: str, size: int, rounds: int, slow_rounds: int, ways: dict[str, Way]) -> Found:
    """Interleaved runs of one program. transformers, which takes longest, takes part in the first `slow_rounds`."""
    able = [way for way in ways if way not in OF_SELECT or name == "select8"]
    for way in able:
        ways[way](name, 1)
    found: Found = {way: [] for way in able}
    for number in range(rounds):
        turn = number % len(able)
        for way in [*able[turn:], *able[:turn]]:
            if way != "transformers" or number < slow_rounds:
                found[way].append(ways[way](name, size))
    return found


def progress(name: str, found: Found) -> str:
    """A line that says how the first round went."""
    first = {way: runs[0] for way, runs in found.items() if runs}
    line = f"{name}: " + ", ".join(f"{way} {run.seconds:.2f} s" for way, run in first.items())
    if "engine" not in first:
        return line
    counters = first["engine"].counters
    return f"{line}; prefill {counters['prefill_tokens']:.0f}, at least {counters['least_prefill']:.0f}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=",".join(PROGRAMS), help="names, separated by commas; default: all")
    parser.add_argument("--size", type=int, help="cases of a run; default: what each program says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds in which transformers takes part")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args(arguments)
    names = options.program.split(",")
    unknown = set(names) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown programs: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    results: dict[str, Found] = {}
    with ExitStack() as stack:
        ways = open_ways(stack, options, names)
        for name in names:
            size = options.size or PROGRAMS[name].size
            results[name] = measure(name, size, options.rounds, options.slow_rounds, ways)
            show(progress(name, results[name]))
    text = markdown(results)
    show(text)
    kept: dict[str, Any] = {
        name: {way: [run._asdict() for run in runs] for way, runs in found.items()} for name, found in results.items()
    }
    show(f"kept as {save('lang', text, options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
