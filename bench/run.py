"""phloem beside other engines on W1 to W6g: pairs of runs, interleaved, medians and ratios with quartiles.

python -m bench.run [--workloads W1,W2] [--peer ADAPTER[@PYTHON][:key=value,...]]... [--set quant.use=int8]...
    [--rounds N[,WORKLOAD=N...]] [--write-docs]

Each engine lives in a process of its own and stays loaded; one runs while the others wait. Each round of a pair runs
phloem and the peer on the same variant, the order alternating, so that drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import floors, tree
from bench.documents import judge
from bench.process import PeerSpec, Worker, WorkerError
from bench.report import markdown, write_docs
from bench.workloads import load
from phloem.plugins.command._machine import describe

RESULTS = Path(__file__).parent / "results"
VARIANTS = 3  # measured variants of each workload; 0 warms up
WARM_TOKENS = 4
DEFAULT_PEERS = ("hf:mode=static", "hf:mode=batch")
TREE_NODES = 100_000
DECODE_BATCH = "W3"  # 64 requests decode together: host share at batch 64, and the tree's busiest workload


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.run", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument(
        "--peer", action="append", help="engine to compare with; may be repeated; default: transformers both ways"
    )
    parser.add_argument("--phloem", default="phloem", help="options of phloem itself, as phloem:key=value")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="of phloem; repeatable"
    )
    parser.add_argument("--rounds", default=str(VARIANTS), help="pairs of each workload and peer, such as 3,W1=7,W2=7")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds: a peer slower than this runs once")
    parser.add_argument("--requests", type=int, help="of W2, W3, W6 and W6g, at most: for a trial")
    parser.add_argument("--no-floors", action="store_true", help="skip measuring what the machine allows")
    parser.add_argument("--no-profile", action="store_true", help="skip the run that times steps and cache")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/benchmarks.md")
    return parser.parse_args(argv)


def rounds_of(text: str, workload: str) -> int:
    """The number for this workload in the text that --rounds takes. Raises ValueError."""
    numbers = {name: number for name, _, number in (part.rpartition("=") for part in text.split(","))}
    return int(numbers.get(workload, numbers.get("", VARIANTS)))


def measured(worker: Worker, workload: str, number: int, limits: dict[str, int]) -> dict[str, Any]:
    """One run; of constrained ones the documents are judged here, by one validator for all engines."""
    reply = worker.ask(workload=workload, variant=number, **limits)
    if workload == "W6g":
        data = load(workload, number)
        reply["metrics"] |= judge(reply["documents"], data["schema"], data["max_tokens"], reply["metrics"]["s"])
    return reply


def pairs(
    ours: Worker, theirs: Worker, workload: str, rounds: int, patience: float, limits: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """Runs of both engines, one entry per round. A peer that takes longer than `patience` gets one round."""
    for worker in (ours, theirs):
        worker.ask(workload=workload, variant=0, **{**(limits or {}), "max_tokens": WARM_TOKENS})
    done: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        replies = {worker: measured(worker, workload, number, limits or {}) for worker in order}
        done.append({"ours": replies[ours], "theirs": replies[theirs]})
        if replies[theirs]["metrics"]["s"] > patience:
            break
    return done


def compare(
    ours: Worker, peers: list[PeerSpec], options: argparse.Namespace, engines: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """All pairs of all workloads and peers; a peer that fails is reported, not fatal. `engines` gets peers' facts."""
    results: list[dict[str, Any]] = []
    limits = {"requests": options.requests} if options.requests else {}
    workloads = options.workloads.split(",")
    for spec in peers:
        try:
            theirs = Worker(spec)
        except (WorkerError, OSError) as error:
            results += [{"workload": name, "peer": spec.label, "rounds": [], "error": str(error)} for name in workloads]
            print(markdown(results[-len(workloads) :]).splitlines()[-1], flush=True)
            continue
        try:
            for workload in workloads:
                entry: dict[str, Any] = {"workload": workload, "peer": spec.label, "rounds": []}
                try:
                    rounds = rounds_of(options.rounds, workload)
                    entry["rounds"] = pairs(ours, theirs, workload, rounds, options.patience, limits)
                except WorkerError as error:
                    entry["error"] = str(error)
                results.append(entry)
                print(markdown([entry]).splitlines()[-1], flush=True)
            if engines is not None:
                engines[spec.label] = theirs.facts()
        finally:
            theirs.close()
    return results


def add_floors(results: list[dict[str, Any]], model: str, quant: str) -> dict[str, Any]:
    """Put `floor_s` beside the seconds of phloem's runs; returns what it rests on. All workers should be idle."""
    machine, weights = floors.measure(), floors.weights_of(model, quant)
    for run in (each["ours"] for entry in results for each in entry["rounds"]):
        if run["passes"]:
            run["metrics"]["floor_s"] = floors.floor(run["passes"], weights, machine)
    return {**machine._asdict(), **weights._asdict()}


def profile(spec: PeerSpec) -> dict[str, float]:
    """One run with the cache timed and all steps kept, in a process of its own: no timer in what is compared."""
    worker = Worker(PeerSpec(spec.adapter, spec.python, {**spec.options, "profile": True}))
    try:
        worker.ask(workload=DECODE_BATCH, variant=0)
        counters: dict[str, float] = worker.ask(workload=DECODE_BATCH, variant=1)["counters"]
        return counters
    finally:
        worker.close()


def main(argv: list[str] | None = None) -> int:
    """Run, print, and keep the results."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    spec = PeerSpec.parse(options.phloem)
    spec.options["sets"] = options.sets
    begin = time.perf_counter()
    ours = Worker(spec)
    try:
        results = compare(ours, [PeerSpec.parse(text) for text in options.peer or DEFAULT_PEERS], options)
        report: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe(),
            "ours": {"ready_s": ours.ready_s, **ours.about},
            "results": results,
        }
    finally:
        ours.close()
    if not options.no_floors:
        try:
            report["floors"] = add_floors(results, ours.about["model"], ours.about["quant"])
        except ValueError as error:
            print(f"no floors: {error}", file=sys.stderr)
    if not options.no_profile:
        report["profile"] = profile(spec)
        report["tree"] = tree.measure(TREE_NODES, page_size=1, seed=0)
    report["took_s"] = time.perf_counter() - begin
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"run-{report['when'].replace(':', '')}.json").write_text(json.dumps(report, indent=1))
    text = markdown(results, report)
    (RESULTS / "latest.md").write_text(text)
    print(text)
    if options.write_docs:
        write_docs(report)
    return 1 if any("error" in entry for entry in results) else 0


if __name__ == "__main__":
    sys.exit(main())
