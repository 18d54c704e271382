"""Tables from paired runs: medians, and the ratio of each pair with its quartiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench.run -->", "<!-- /bench.run -->"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _row(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f"| {entry['workload']} | {entry['peer']} | failed: {entry['error'][:120]} | | | | | |"
    ours = [each["ours"]["metrics"] for each in entry["rounds"]]
    theirs = [each["theirs"]["metrics"] for each in entry["rounds"]]
    low, middle, high = quartiles(ratios(entry))

    def median(runs: list[dict[str, float]], name: str, form: str) -> str:
        return format(statistics.median(run[name] for run in runs), form)

    return (
        f"| {entry['workload']} | {entry['peer']} | {median(ours, 's', '.2f')} | {median(theirs, 's', '.2f')} "
        f"| {median(ours, 'out_tok_s', '.1f')} | {median(theirs, 'out_tok_s', '.1f')} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}, n={len(ours)}) | {over_floor(ours)} |"
    )


def over_floor(runs: Sequence[Mapping[str, float]]) -> str:
    """Median of the runs' seconds over the least that they could take; empty where that is not known."""
    ratios = [run["s"] / run["floor_s"] for run in runs if "floor_s" in run]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def ratios(entry: Mapping[str, Any]) -> list[float]:
    """The peer's time over phloem's, pair by pair; under a schema, of the seconds per valid document."""
    pairs = [(each["ours"]["metrics"], each["theirs"]["metrics"]) for each in entry["rounds"]]
    what = "s_valid" if "s_valid" in pairs[0][0] else "s"
    return [_over(theirs[what], ours[what]) for ours, theirs in pairs]


def _over(theirs: float, ours: float) -> float:
    return 0.0 if math.isinf(ours) else theirs / ours


def _documents(results: Sequence[dict[str, Any]]) -> list[str]:
    """Constrained runs: what the documents were, and what a valid one took."""
    rows = []
    for entry in results:
        for side, name in (("ours", "phloem"), ("theirs", entry["peer"])):
            runs = [each[side]["metrics"] for each in entry["rounds"] if "s_valid" in each[side]["metrics"]]
            if runs:
                counts = " / ".join(f"{sum(run[kind] for run in runs):.0f}" for kind in ("valid", "cut", "wrong"))
                tokens = statistics.median(run["tokens_a_document"] for run in runs)
                seconds = statistics.median(run["s_valid"] for run in runs)
                rows.append(f"| {entry['workload']} | {name} | {counts} | {tokens:.1f} | {seconds:.3f} |")
    if not rows:
        return []
    head = [
        "| workload | engine | documents valid / cut / wrong | tokens a document | s per valid document |",
        "|---|---|---|---|---|",
    ]
    return [
        "",
        "Documents under a schema; *cut* ones met the token limit, a *wrong* one was ended invalid:",
        "",
        *head,
        *rows,
    ]


def _sharing(results: Sequence[dict[str, Any]]) -> list[str]:
    """phloem's prefill and cached share on the workloads that share prefixes: the first pair's rounds."""
    rows, seen = [], set()
    for entry in results:
        name = entry["workload"]
        runs = [each["ours"]["counters"] for each in entry["rounds"] if each["ours"]["counters"]]
        if name in seen or name not in ("W3", "W4", "W5") or not runs:
            continue
        seen.add(name)
        mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(
            f"| {name} | {mid['prefill_tokens']:.0f} | {mid['least_prefill']:.0f} | {mid['prefill_ratio']:.3f} "
            f"| {100 * mid['cached_share']:.1f} % |"
        )
    if not rows:
        return []
    head = ["| workload | prefill tokens | minimum | ratio | cached |", "|---|---|---|---|---|"]
    return ["", "What phloem computed, beside the least possible:", "", *head, *rows]


def _inside(profile: dict[str, float] | None, tree: dict[str, float] | None) -> list[str]:
    """Where phloem's own time goes: host and cache shares on W3, and the tree's operations."""
    lines = []
    if profile:
        steps = profile["decode_steps"]
        parts = ("plan", "build", "forward", "sample", "commit")
        times = ", ".join(f"{part} {1e3 * profile[f'decode_{part}_s'] / max(1, steps):.2f}" for part in parts)
        lines += [
            "",
            f"W3, {steps:.0f} decode steps of {profile['decode_batch']:.0f} requests: host time "
            f"{100 * profile['decode_host_share']:.2f} % of the step (milliseconds: {times}). Over the whole run, "
            f"{profile['steps']:.0f} steps: host time {100 * profile['host_share']:.2f} %, the cache's methods "
            f"{100 * profile['cache_share']:.3f} %.",
        ]
    if tree:
        names = ("peek", "match", "insert", "request", "split", "evict")
        rates = ", ".join(f"{name} {tree[name]:,.0f}" for name in names if name in tree)
        lines += ["", f"Radix tree of {tree['nodes']:,.0f} nodes, operations per second: {rates}."]
    return lines


def markdown(results: Sequence[dict[str, Any]], report: dict[str, Any] | None = None) -> str:
    """The table of all pairs, and with a whole report the counters and the machine."""
    lines = [
        "| workload | peer | phloem s | peer s | phloem tok/s | peer tok/s | peer time / phloem time "
        "| phloem time / floor |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(entry) for entry in results),
    ]
    if report is None:
        return "\n".join(lines)
    lines += _documents(results)
    lines += _sharing(results)
    lines += _inside(report.get("profile"), report.get("tree"))
    if "floors" in report:
        lines += ["", floors_text(report["floors"])]
    lines += [
        "",
        f"{machine_text(report)} Ratios of times are the median of the pairs' with its quartiles; above 1 phloem is "
        "faster.",
    ]
    return "\n".join(lines) + "\n"


def floors_text(floors: dict[str, Any]) -> str:
    """What the floors of a table were put together from."""
    rate = floors["rates"][floors["product"]]
    return (
        f"Floors: {floors['bytes'] / 1e6:.0f} MB of weights a pass at {floors['bandwidth'] / 1e9:.1f} GB/s, or their "
        f"products at {rate / 1e9:.0f} GOP/s in {floors['product']}, whichever takes longer."
    )


def machine_text(report: dict[str, Any]) -> str:
    """When and where a report was made."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{report['when']}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{' '.join(machine['flags'])}; {versions}."
    )


def write_docs(report: dict[str, Any]) -> None:
    """Put a report into docs/benchmarks.md."""
    replace(BEGIN, END, markdown(report["results"], report))


def replace(begin: str, end: str, text: str) -> None:
    """Replace the part of docs/benchmarks.md between two markers, which it must have."""
    head, found, rest = DOCS.read_text().partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{DOCS} has no {begin} ... {end}")
    DOCS.write_text(f"{head}{begin}\n{text}{end}{tail}")
