"""phloem beside other engines at equal precision: installs them, runs W1 to W6g in interleaved pairs, writes tables.

    python -m bench.against [--into .peers] [--have NAME=PATH]... [--precisions "float32,8 bits"] [--peers openvino]
        [--rounds 3,W1=7,W2=7] [--write-docs]

`make bench-peers` is the same. Each peer gets an environment of its own below `--into`; one that does not install is
left out, and the tables say why. `--have` names what exists already: `openvino`, `exporter` or `vllm` an interpreter,
`llama_server` the binary, `folder` the model in float32, `openvino-int8` and the like an exported model. The tables go
to `bench/results/`, and with `--write-docs` into docs/benchmarks.md. All of it takes hours; run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import run
from bench.against.install import LEFT_OUT, NotInstalled, Shelf
from bench.against.precisions import MAKERS, PRECISIONS, Precision
from bench.against.table import document
from bench.pairs import RESULTS
from bench.process import PeerSpec, Worker, WorkerError
from bench.report import replace
from phloem.errors import PhloemError
from phloem.plugins.command._machine import describe

BEGIN, END = "<!-- bench.against -->", "<!-- /bench.against -->"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=Path(".peers"), help="where environments and models are kept")
    parser.add_argument("--have", action="append", default=[], metavar="NAME=PATH", help="may be repeated")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precisions", type=_names, default=list(PRECISIONS), help=", ".join(PRECISIONS))
    parser.add_argument("--peers", type=_names, default=list(MAKERS), help=", ".join(MAKERS))
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6g")
    parser.add_argument("--rounds", default="3,W1=7,W2=7", help="pairs of each workload and peer")
    parser.add_argument("--requests", type=int, help="of W2, W3 and W6g, at most: for a trial")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds: a peer slower than this runs once")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--install-only", action="store_true", help="make environments and models, run nothing")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    for name, given, known in (("precisions", options.precisions, PRECISIONS), ("peers", options.peers, MAKERS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} is not one of {', '.join(known)}")
    return options


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def gather(shelf: Shelf, precision: Precision, wanted: Sequence[str]) -> tuple[list[PeerSpec], dict[str, str]]:
    """The peers that could be installed, and of the others the reason."""
    found, missing = [], {}
    for name, arguments in precision.peers:
        if name in wanted:
            try:
                found.append(MAKERS[name](shelf, **arguments))
            except (NotInstalled, PhloemError, OSError) as error:
                missing[name] = str(error)
    return found, missing


def measure(options: argparse.Namespace, precision: Precision, peers: Sequence[PeerSpec]) -> dict[str, Any]:
    """One precision's report. Raises WorkerError if phloem itself does not start."""
    sets = [f"quant.use={precision.quant}", *options.sets]
    ours = Worker(PeerSpec("phloem", options={"model": options.model, "sets": sets}))
    try:
        engines: dict[str, Any] = {}
        report: dict[str, Any] = {"results": run.compare(ours, list(peers), options, engines), "engines": engines}
        engines["phloem"] = ours.facts()
    finally:
        ours.close()
    try:
        report["floors"] = run.add_floors(report["results"], ours.about["model"], precision.quant)
    except ValueError as error:
        report["no_floors"] = str(error)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run and write; 1 if a precision could not be measured at all."""
    options = parse(arguments)
    shelf = Shelf(options.into.absolute(), options.model, dict(pair.split("=", 1) for pair in options.have))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"when": now, "machine": describe(), "missing": dict(LEFT_OUT), "precisions": {}}
    for name in options.precisions:
        precision = PRECISIONS[name]
        peers, missing = gather(shelf, precision, options.peers)
        report["missing"] |= missing
        print(f"{name}: {', '.join(peer.label for peer in peers) or 'no peer'}", flush=True)
        for peer, why in missing.items():
            print(f"  {peer} is left out: {why}", flush=True)
        if options.install_only:
            continue
        try:
            report["precisions"][name] = measure(options, precision, peers)
        except WorkerError as error:
            report["precisions"][name] = {"error": str(error)}
    if options.install_only:
        return 0
    text = document(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"against-{now[:19].replace(':', '')}.json").write_text(json.dumps({**report, "text": text}, indent=1))
    print(text)
    if options.write_docs:
        replace(BEGIN, END, text)
    return 1 if any("error" in each for each in report["precisions"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
