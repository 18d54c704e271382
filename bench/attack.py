"""What hostile constraints do to other requests: latencies of steady traffic with and without an attacker.

python -m bench.attack [MODEL] [--kind regex,large,distinct,deep] [--rounds 3] [--seconds 15] [--rate 0.7]

A server of its own gets short plain requests and ones under W6's schema, at random times that are the same in every
window. Windows with and without the attacker take turns; the attacker is a process of its own. The target is that p99
between tokens moves by less than 5 %; for `distinct`, whose requests are answered, by no more than beside `plain` ones,
as many without a constraint. The quiet windows say by how much it moves on its own: `noise` is the spread of their p99,
half of the range in percent of the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.attacker import KINDS
from bench.pairs import in_turns, save
from bench.process import ROOT
from bench.traffic import Seen, bodies, renamed, window
from phloem.plugins.command._load import quantile
from tests.live import Live

CALM_S = 2.0  # after an attack, for what it left to end
MOST_S = 300.0  # of one attack
LEAST = 3  # requests expected in a window, without which there may be nothing to compare
HEAD = (
    "| attack | requests | TTFT p50 ms | p99 | between tokens p50 ms | p99 | p99 moves | noise | attacker's answers |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Attack:
    """An attacker process, from `__enter__` to `__exit__`."""

    def __init__(self, url: str, kind: str, clients: int, pace: float) -> None:
        self._command = [sys.executable, "-m", "bench.attacker", url, kind, "--clients", str(clients)]
        self._command += ["--pace", str(pace), "--seconds", str(MOST_S)]
        self.answers: Counter[str] = Counter()
        self._next = 0

    def __enter__(self) -> None:
        command = [*self._command, "--first", str(self._next)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __exit__(self, *_: object) -> None:
        report = json.loads(self._process.communicate()[0])
        self._next = report["next"]
        self.answers.update(report["answers"])
        time.sleep(CALM_S)


def pooled(windows: Sequence[Seen]) -> Seen:
    """All of them as one."""
    total = Seen()
    for one in windows:
        total.add(one)
    return total


def row(kind: str, found: Sequence[tuple[Seen, Seen]], answers: Counter[str]) -> str:
    """A line of the table."""
    quiet, attacked = (pooled(side) for side in zip(*found, strict=True))
    each = [quantile(one.between, 0.99) for one, _ in found]
    noise = (max(each) - min(each)) / 2 / statistics.median(each)
    moves = quantile(attacked.between, 0.99) / quantile(quiet.between, 0.99) - 1

    def both(name: str, q: float) -> str:
        return " / ".join(f"{1e3 * quantile(getattr(seen, name), q):.1f}" for seen in (quiet, attacked))

    cells = [kind, f"{len(quiet.first)} / {len(attacked.first)}"]
    cells += [both("first", 0.5), both("first", 0.99), both("between", 0.5), both("between", 0.99)]
    answered = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
    return "| " + " | ".join([*cells, f"**{moves:+.1%}**", f"{noise:.1%}", answered or "none"]) + " |"


def measure(server: Live, kind: str, work: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """One kind of attack, all rounds."""
    attack = Attack(server.url, kind, options.clients, options.pace)

    def traffic(_: int) -> Seen:
        now = [renamed(body) for body in work] if options.fresh else work
        return asyncio.run(window(server.url, now, options.rate, options.seconds, seed=0))

    def attacked(number: int) -> Seen:
        with attack:
            return traffic(number)

    found = in_turns(options.rounds, traffic, attacked)
    failed = [problem for pair in found for seen in pair for problem in seen.failed]
    raw = [[vars(seen) for seen in pair] for pair in found]
    return {"row": row(kind, found, attack.answers), "failed": failed, "windows": raw}


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print, and keep the results. 1 if any request of the traffic failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--kind", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of windows for each kind")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one window")
    parser.add_argument("--rate", type=float, default=0.7, help="requests a second")
    parser.add_argument("--tokens", type=int, default=32, help="of a plain request; three times as many for a document")
    parser.add_argument("--fresh", action="store_true", help="no two documents of the traffic have one schema")
    parser.add_argument("--vocabulary", type=int, default=49152, help="of the model: ids of the prompts lie below")
    parser.add_argument("--clients", type=int, default=4, help="of the attacker")
    parser.add_argument("--pace", type=float, default=8.0, help="the attacker's requests a second, at most")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.OPTION=VALUE")
    options = parser.parse_args(arguments)
    if options.rate * options.seconds < LEAST:
        parser.error(f"a window needs {LEAST} requests: raise --seconds or --rate")
    sets = ("engine.threads=auto", "engine.check=false", "server.heartbeat_s=1", *options.sets)
    lines, kept = [HEAD], {}
    with Live(options.model, *sets) as server:
        work = bodies(options.tokens, 3 * options.tokens, options.vocabulary)
        asyncio.run(window(server.url, work, options.rate, options.seconds, seed=0))
        for kind in options.kind.split(","):
            kept[kind] = measure(server, kind, work, options)
            lines.append(kept[kind]["row"])
            show("\n".join(lines[-1 - (len(lines) == 2) :]))
    failed = [problem for one in kept.values() for problem in one["failed"]]
    show(f"{len(failed)} requests of the traffic failed {failed[:3] or ''}")
    show(f"kept as {save('attack', chr(10).join(lines), options=vars(options), kinds=kept)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
