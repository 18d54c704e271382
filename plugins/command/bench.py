"""`phloem bench`: a quick benchmark of one engine on synthetic requests, and the comparison of two saved results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phloem.errors import ConfigError

from ._arguments import natural, positive, positives
from ._machine import describe
from ._table import table as tabulate
from ._target import add_target, open_engine

SCHEMA = 1
# Lengths in tokens: (shared prefix, own input, output). Each stresses one part of the engine.
WORKLOADS: dict[str, tuple[int, int, int]] = {
    "chat": (0, 128, 64),
    "prefill": (0, 512, 1),
    "decode": (0, 16, 128),
    "prefix": (512, 32, 16),
}
# (key in a result, heading, format)
COLUMNS = (
    ("concurrency", "clients", "{:.0f}"),
    ("output_tok_s", "out tok/s", "{:.1f}"),
    ("total_tok_s", "all tok/s", "{:.1f}"),
    ("requests_s", "req/s", "{:.2f}"),
    ("ttft_p50_ms", "TTFT p50", "{:.0f}"),
    ("ttft_p99_ms", "p99 ms", "{:.0f}"),
    ("itl_p50_ms", "ITL p50", "{:.1f}"),
    ("itl_p99_ms", "p99 ms", "{:.1f}"),
)
COMPARED = ("output_tok_s", "requests_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


class Bench:
    """The command."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Arguments of `phloem bench`."""
        lengths = "; ".join(f"{name}: {p}+{i} in, {o} out" for name, (p, i, o) in WORKLOADS.items())
        add_target(parser, optional=True)
        parser.add_argument("--workload", choices=WORKLOADS, default="chat", help=f"lengths in tokens ({lengths})")
        parser.add_argument("--requests", type=positive, default=32, help="requests of each run")
        parser.add_argument("--input", type=positive, help="tokens of each prompt that are its own")
        parser.add_argument("--output", type=positive, help="tokens to write for each request")
        parser.add_argument("--prefix", type=natural, help="tokens that all prompts start with")
        parser.add_argument("--concurrency", type=positives, default=[1, 8, 32], help="clients, one run each: 1,8,32")
        parser.add_argument("--seed", type=int, default=0, help="of the prompts")
        parser.add_argument("--json", dest="save", metavar="FILE", help="save the result")
        parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
        parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two saved results, run nothing")

    def run(self, args: argparse.Namespace) -> int:
        """Run the load, or compare."""
        if args.compare:
            print(comparison(*(read(path) for path in args.compare)))
            return 0
        if args.target is None:
            raise ConfigError("bench needs a model or a configuration", hint="phloem bench smollm2-135m")
        if args.save and not Path(args.save).resolve().parent.is_dir():
            raise ConfigError(f"--json {args.save}: the folder does not exist", hint="create it first")
        report = measure(args)
        print(table(report["runs"]))
        if args.profile:
            print("\n" + breakdown(report["runs"]))
        if args.save:
            Path(args.save).write_text(json.dumps(report, indent=1) + "\n")
        return 0


bench = Bench()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load the engine and run every concurrency on fresh prompts; the whole result as it is saved."""
    from ._load import Shape, prompts, run

    prefix, own, output = WORKLOADS[args.workload]
    own, output = args.input or own, args.output or output
    prefix = prefix if args.prefix is None else args.prefix
    shape = Shape(args.requests, own, output, prefix)
    workload = {"name": args.workload, **asdict(shape)}
    with open_engine(args.target, args.sets) as engine:
        vocabulary = range(engine.tokenizer.vocab_size)
        run(engine, prompts(Shape(2, own, 1, prefix), vocabulary, args.seed - 1), 1, 1)  # warms up, measures nothing
        runs = []
        for number, concurrency in enumerate(args.concurrency):
            engine.flush_cache()
            work = prompts(shape, vocabulary, args.seed + number)
            runs.append(run(engine, work, output, concurrency))
        config = engine.config.dump()
    return {
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": workload,
        "seed": args.seed,
        "config": config,
        "machine": describe(),
        "runs": runs,
    }


def table(runs: Sequence[Mapping[str, float]]) -> str:
    """One line per run."""
    shown = [column for column in COLUMNS if column[0] in runs[0]]
    rows = [[heading for _, heading, _ in shown]]
    rows += [[form.format(run[key]) for key, _, form in shown] for run in runs]
    return tabulate(rows[0], rows[1:])


def breakdown(runs: Sequence[Mapping[str, float]]) -> str:
    """Milliseconds per step by part, and the host's share of the step."""
    from ._load import STEP_TIMES

    rows = [["clients", "steps", *(f"{name[:-2]} ms" for name in STEP_TIMES), "host share", "cached"]]
    for run in runs:
        total = sum(run[name] for name in STEP_TIMES) or 1.0
        host = run["plan_s"] + run["build_s"] + run["commit_s"]
        prompt_tokens = (run["prefill_tokens"] + run["cached_tokens"]) or 1.0
        times = [f"{1e3 * run[name] / max(1, run['steps']):.3f}" for name in STEP_TIMES]
        shares = [f"{100 * host / total:.2f} %", f"{100 * run['cached_tokens'] / prompt_tokens:.1f} %"]
        rows.append([f"{run['concurrency']:.0f}", f"{run['steps']:.0f}", *times, *shares])
    return tabulate(rows[0], rows[1:])


def read(path: str) -> dict[str, Any]:
    """A saved result. Raises ConfigError if it is not one."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: not a result of this version's `phloem bench --json`")
    return data


def comparison(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """B beside A for every concurrency both have, and what else differs between them."""
    rows = [["clients", "figure", "A", "B", "B / A"]]
    others = {run["concurrency"]: run for run in b["runs"]}
    for run in a["runs"]:
        other = others.get(run["concurrency"])
        if other is None:
            continue
        for name in COMPARED:
            if run.get(name) and name in other:
                figures = [f"{run[name]:.2f}", f"{other[name]:.2f}", f"{other[name] / run[name]:.3f}"]
                rows.append([f"{run['concurrency']:.0f}", name, *figures])
    if len(rows) == 1:
        raise ConfigError("the two results have no concurrency in common")
    notes = [
        f"{key}: A {left!r}, B {right!r}"
        for key, left, right in _differences({k: a[k] for k in _CONTEXT}, {k: b[k] for k in _CONTEXT})
    ]
    return "\n".join([tabulate(rows[0], rows[1:]), *(["", "differs:", *notes] if notes else [])])


_CONTEXT = ("workload", "seed", "config", "machine")


def _differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b})
        return [found for key in keys for found in _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))]
    return [] if a == b else [(path, a, b)]
