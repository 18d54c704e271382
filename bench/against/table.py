"""The tables of `bench.against`: per precision a row for each workload with the best peer of that row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.against.precisions import PRECISIONS
from bench.report import floors_text, machine_text, over_floor, quartiles, ratios

HEAD = (
    "| workload | phloem s | phloem tok/s | over floor | best peer | its s | its tok/s | peer time / phloem time "
    "| target | other peers |\n|---|---|---|---|---|---|---|---|---|---|"
)
ENGINES = "| engine | version | ready after s | MB at rest | MB at most |\n|---|---|---|---|---|"


def document(report: dict[str, Any]) -> str:
    """All of a report as Markdown."""
    lines: list[str] = []
    for name, found in report["precisions"].items():
        lines += [f"### At {name}", ""]
        if "error" in found:
            lines += [f"Not measured: {found['error']}", ""]
            continue
        lines += [HEAD, *rows(found["results"], PRECISIONS[name].targets), ""]
        lines += [f"{floors_text(found['floors'])}", ""] if "floors" in found else []
        lines += [ENGINES, *(_engine(label, facts) for label, facts in found["engines"].items()), ""]
    lines += [f"Left out: {name}: {why}." for name, why in sorted(report["missing"].items())]
    lines += [
        "",
        f"{machine_text(report)} Seconds are medians, under a schema (W6g) of a valid document. A row's best peer is "
        "the one with the lowest median ratio; ratios are of pairs run one after the other, with quartiles, and above "
        "1 phloem is faster.",
    ]
    return "\n".join(lines) + "\n"


def rows(results: Sequence[Mapping[str, Any]], targets: Mapping[str, float]) -> list[str]:
    """A row for each workload, in the order in which they were run."""
    names = list(dict.fromkeys(entry["workload"] for entry in results))
    return [_row(name, [entry for entry in results if entry["workload"] == name], targets.get(name)) for name in names]


def _row(name: str, entries: Sequence[Mapping[str, Any]], target: float | None) -> str:
    ran = sorted((entry for entry in entries if entry["rounds"]), key=lambda entry: quartiles(ratios(entry))[1])
    failed = [f"{entry['peer']} failed: {entry['error'][:80]}" for entry in entries if not entry["rounds"]]
    if not ran:
        return f"| {name} | | | | | | | | {_goal(target)} | {'; '.join(failed)} |"
    best = ran[0]
    ours, theirs = ([each[side]["metrics"] for each in best["rounds"]] for side in ("ours", "theirs"))
    others = [f"{entry['peer']} {quartiles(ratios(entry))[1]:.2f}" for entry in ran[1:]]
    cells = [name, *_speed(ours), over_floor(ours), best["peer"], *_speed(theirs), ratio(best), _goal(target)]
    return f"| {' | '.join(cells)} | {'; '.join([*others, *failed])} |"


def _speed(runs: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    what = "s_valid" if "s_valid" in runs[0] else "s"
    return f"{statistics.median(r[what] for r in runs):.2f}", f"{statistics.median(r['out_tok_s'] for r in runs):.1f}"


def ratio(entry: Mapping[str, Any]) -> str:
    """Median with quartiles of the peer's time over phloem's."""
    low, middle, high = quartiles(ratios(entry))
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, n={len(entry['rounds'])})"


def _goal(target: float | None) -> str:
    return "" if target is None else f">= {target:g}"


def _engine(label: str, facts: Mapping[str, Any]) -> str:
    name = label.partition("-")[0]
    version = next((str(value) for key, value in facts["about"].items() if key.startswith(name)), "")
    return f"| {label} | {version} | {facts['ready_s']:.1f} | {facts['rest_mb']:.0f} | {facts['most_mb']:.0f} |"
