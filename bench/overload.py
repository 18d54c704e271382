"""Admission when demand exceeds the pool: `python -m bench.overload [--demand 1.1,2] [--json PATH]`.

Scheduler, ledger, cache and policy as in an engine, without a model; counts only, the same on any machine. So many
clients each send one request after another that their running texts would fill `demand` times the pool if it were large
enough. Prompts are 50 to 150 tokens, all different; outputs may be 200 tokens long, and are as the case says:

    limit       all 200
    early       end by themselves, at a length drawn from a geometric distribution with mean 50
    two kinds   three of four end within 20, the fourth writes all 200

`retracted` is retractions per 100 requests, `again` the share of all tokens run that had been computed before and was
lost, `used` the mean share of the pool in use by running requests, `speed` tokens written per step. Admission is the
engine's (`learnt`), that of one who knows every output's length (`known`), or one that keeps a fixed share of what a
request may still write (`share 0.3`, `share 1`).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.rig import Rig
from phloem.foresight import Floats, Foresight
from phloem.request import Request

POOL, LIMIT = 8_192, 200
PROMPT = (50, 150)
WARM, REQUESTS = 100, 400

CASES: dict[str, Callable[[random.Random], int]] = {
    "limit": lambda rng: LIMIT,
    "early": lambda rng: min(LIMIT, 1 + int(rng.expovariate(1 / 49))),
    "two kinds": lambda rng: rng.randint(1, 20) if rng.random() < 0.75 else LIMIT,
}


class Known(Foresight):
    """Knows how long every output will be."""

    def __init__(self, lengths: dict[Request, int]) -> None:
        super().__init__()
        self._lengths = lengths

    def remaining(self, requests: Sequence[Request]) -> Floats:
        """The truth."""
        return np.array([self._lengths[request] - request.output_len for request in requests], dtype=np.float64)


class Share(Foresight):
    """Reckons with a fixed share of what a request may still write, and with nobody's end."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def demand(self, requests: Sequence[Request]) -> int:
        """The sum."""
        return sum(len(r.tokens) - r.capacity + int(self._share * r.remaining) for r in requests)


def footprint(draw: Callable[[random.Random], int]) -> float:
    """Mean length of a running text: over the steps, so that long outputs count as long as they last."""
    outputs = [draw(random.Random(i)) for i in range(2000)]
    return sum(PROMPT) / 2 + sum(length * length / 2 for length in outputs) / sum(outputs)


def run(case: str, demand: float, admission: str, seed: int) -> dict[str, Any]:
    """One row."""
    rng = random.Random(seed)
    draw = CASES[case]
    clients = max(2, round(demand * POOL / footprint(draw)))
    rig = Rig("lpm", pool=POOL, context=4096, max_running=512, max_tokens_per_step=2048, chunk=512)
    lengths: dict[Request, int] = {}
    if admission == "known":
        rig.scheduler.foresight = Known(lengths)
    elif admission != "learnt":
        rig.scheduler.foresight = Share(float(admission.split()[1]))
    rig.ends = lambda request: request.output_len >= lengths[request]

    def send() -> None:
        request = rig.add([rng.randrange(50_000) for _ in range(rng.randint(*PROMPT))], LIMIT)
        lengths[request] = draw(rng)

    for _ in range(clients):
        send()
    steps = used = retracted = written = ran = again = 0
    while rig.finished < WARM + REQUESTS:
        before = rig.finished, rig.scheduler.retractions, rig.generated, rig.recomputed
        rows = rig.step()
        for _ in range(rig.finished - before[0]):
            send()
        if rig.finished >= WARM:
            steps += 1
            ran += rows
            retracted += rig.scheduler.retractions - before[1]
            written += rig.generated - before[2]
            again += rig.recomputed - before[3]
            used += sum(len(request.tokens) for request in rig.scheduler.running)
    return {
        "case": case,
        "demand": demand,
        "admission": admission,
        "clients": clients,
        "retracted": round(100 * retracted / REQUESTS, 1),
        "again": round(again / ran, 4),
        "used": round(used / steps / POOL, 3),
        "speed": round(written / steps, 1),
    }


def main() -> None:
    """Count, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demand", default="1.1", help="times the pool, comma separated")
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument("--admission", default="learnt,known,share 0.3,share 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for demand in map(float, options.demand.split(",")):
        for case in options.case.split(","):
            for admission in options.admission.split(","):
                rows.append(run(case, demand, admission, options.seed))
                if len(rows) == 1:
                    print("".join(f"{key:>12}" for key in rows[0]))
                print("".join(f"{value:>12}" for value in rows[-1].values()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
