"""Tables of a run: programs a second and ratios of time by way, and what was computed beside the least possible.

python -m bench.lang.table RESULT.json... [--write-docs] makes them of results that were kept, of several runs together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.lang.programs import PROGRAMS
from bench.lang.ways import Run
from bench.pairs import spread
from bench.report import DOCS

Found = dict[str, list[Run]]  # runs by way, in rounds
SHOWN = ("engine", "server", "calls", "transformers")
RATIOS = (("calls", "server"), ("transformers", "engine"), ("one-by-one", "one-tree"))
BEGIN, END = "<!-- bench.lang -->", "<!-- /bench.lang -->"
TARGETS = "Targets: prefill at most 1.02 of the minimum; calls / server at least 1.2 where branches fork (marked *)."


def markdown(results: Mapping[str, Found]) -> str:
    """Both tables."""
    ways = [way for way in SHOWN if any(way in found for found in results.values())]
    rates = [
        f"| program | cases | {' | '.join(f'{way}, programs/s' for way in ways)} | "
        f"{' | '.join(f'{slow} / {fast}, time' for slow, fast in RATIOS)} |",
        "|---" * (len(ways) + 5) + "|",
        *(_rates(name, found, ways) for name, found in results.items()),
    ]
    work = [
        "| program | calls of the engine | minimum | engine prefill | ratio | server prefill | ratio "
        "| prefill of calls | ratio | scored tokens | equal texts, server | equal texts, calls |",
        "|---" * 12 + "|",
        *(_work(name, found) for name, found in results.items() if found.get("engine")),
    ]
    return "\n".join([*rates, "", *work, "", TARGETS])


def _rates(name: str, found: Found, ways: Sequence[str]) -> str:
    program = PROGRAMS[name]
    size = max(len(run.outputs) for runs in found.values() for run in runs)
    rates = [_median([size / run.seconds for run in found.get(way, [])], ".2f") for way in ways]
    ratios = [_ratio(found, *pair) for pair in RATIOS]
    return f"| {name}{' *' if program.fork_heavy else ''} | {size} | {' | '.join([*rates, *ratios])} |"


def _work(name: str, found: Found) -> str:
    ours = found["engine"]
    least = ours[0].counters["least_prefill"]
    cells = [f"{ours[0].counters['calls']:.0f}", f"{least:.0f}"]
    for way in ("engine", "server", "calls"):
        runs = found.get(way, [])
        prefill = [run.counters["prefill_tokens"] for run in runs]
        cells += [_median(prefill, ".0f"), _median([count / least for count in prefill], ".3f")]
    cells.append(_median([run.counters["scored_tokens"] for run in ours], ".0f"))
    cells += [_equal(ours[0], found.get(way, [])) for way in ("server", "calls")]
    return f"| {name} | {' | '.join(cells)} |"


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else ""


def _ratio(found: Found, slow: str, fast: str) -> str:
    """Ratios of the rounds that both ran in."""
    ratios = [a.seconds / b.seconds for a, b in zip(found.get(slow, []), found.get(fast, []), strict=False)]
    return spread(ratios, ".2f") if ratios else ""


def _equal(ours: Run, theirs: Sequence[Run]) -> str:
    """Share of the texts that a way has in common with the engine's."""
    if not theirs:
        return ""
    pairs = [
        (mine, other)
        for case, twin in zip(ours.outputs, theirs[0].outputs, strict=True)
        for mine, other in zip(case, twin, strict=True)
    ]
    return f"{sum(mine == other for mine, other in pairs)} of {len(pairs)}"


def kept(paths: Sequence[Path]) -> tuple[dict[str, Found], str]:
    """Runs of results that were kept, and a line on when and where they were made."""
    reports = [json.loads(path.read_text()) for path in paths]
    results = {
        name: {way: [Run(**run) for run in runs] for way, runs in found.items()}
        for report in reports
        for name, found in report["runs"].items()
    }
    machine = reports[-1]["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {versions}"
    return results, f"{', '.join(report['when'] for report in reports)}; {where}."


def write_docs(text: str) -> None:
    """Replace the part of docs/benchmarks.md between the markers."""
    head, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCS.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Tables of results that were kept.")
    parser.add_argument("result", type=Path, nargs="+")
    parser.add_argument("--write-docs", action="store_true", help="put them into docs/benchmarks.md")
    options = parser.parse_args()
    results, where = kept(options.result)
    text = f"{markdown(results)}\n\n{where}"
    print(text)
    if options.write_docs:
        write_docs(text)


if __name__ == "__main__":
    main()
