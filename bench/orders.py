"""Prompt tokens run under each order, in a cache too small: `python -m bench.orders [--cases 20] [--json PATH]`.

Scheduler, ledger and cache as in an engine, one request at a time, without a model; counts only.

First three interleaved conversations of three turns that all wait, as in the article on SGLang (its totals are 14,688
tokens first come first served and 5,472 by longest prefix; it does not give the sizes, and with 1,440 tokens and 192
more in every turn both totals come out), in pools of several sizes. Then random small queues, six requests of several
conversations with turns of unequal size, against the best of all 720 orders: mean and worst ratio to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rig import Rig
from phloem.registry import Registry

FIRST, TURN, TURNS, CONVERSATIONS = 1_440, 192, 3, 3
SMALLEST = FIRST + TURN * (TURNS - 1) + 1  # the longest text and the token it writes
POOLS = (SMALLEST, 2_400, 3_600, 4_800, SMALLEST * CONVERSATIONS)
ARTICLE = {"fcfs": 14_688, "lpm": 5_472}
Text = list[int]


def prefill(policy: str, prompts: Sequence[Text], pool: int) -> int:
    """Prompt tokens run when all wait from the beginning and one runs at a time."""
    rig = Rig(policy, pool=pool, context=4096, max_running=1, max_tokens_per_step=4096, chunk=4096)
    for prompt in prompts:
        rig.add(prompt, 1)
    rig.drain()
    return rig.prefilled


def article() -> list[Text]:
    """The turns of all conversations, in turn."""
    rng = random.Random(0)
    texts = [[rng.randrange(50_000) for _ in range(FIRST + TURN * TURNS)] for _ in range(CONVERSATIONS)]
    return [text[: FIRST + TURN * turn] for turn in range(TURNS) for text in texts]


def small(seed: int) -> tuple[list[Text], int]:
    """Six requests of two to four conversations that may share a beginning, shuffled; and a pool for about half."""
    rng = random.Random(seed)
    system = [rng.randrange(50_000) for _ in range(rng.choice((0, 20, 60)))]
    texts = [[*system, *(rng.randrange(50_000) for _ in range(200))] for _ in range(rng.randint(2, 4))]
    prompts = [rng.choice(texts)[: len(system) + rng.randint(10, 200)] for _ in range(6)]
    longest = max(map(len, prompts)) + 1
    return prompts, rng.randint(longest, max(longest, len({tuple(p[:i]) for p in prompts for i in range(len(p))}) // 2))


def best(prompts: Sequence[Text], pool: int) -> int:
    """Of all orders."""
    return min(prefill("fcfs", order, pool) for order in itertools.permutations(prompts))


def main() -> None:
    """Count, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = Registry().names("schedule")
    parser.add_argument("--policies", default=",".join(policies))
    parser.add_argument("--cases", type=int, default=20, help="small queues; each takes some seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"article": {}, "small": {}}
    print(f"{'pool':<18}" + "".join(f"{pool:>10,}" for pool in POOLS) + f"{'article':>10}")
    for policy in options.policies.split(","):
        counts = result["article"][policy] = [prefill(policy, article(), pool) for pool in POOLS]
        told = f"{ARTICLE[policy]:,}" if policy in ARTICLE else "-"
        print(f"{policy:<18}" + "".join(f"{count:>10,}" for count in counts) + f"{told:>10}", flush=True)
    cases = [small(seed) for seed in range(options.cases)]
    least = [best(*case) for case in cases]
    print(f"\n{'small queues':<18}{'mean':>10}{'worst':>10}{'optimal':>10}")
    for policy in options.policies.split(",") if cases else ():
        ratios = [prefill(policy, *case) / count for case, count in zip(cases, least, strict=True)]
        row = result["small"][policy] = [sum(ratios) / len(ratios), max(ratios), sum(ratio == 1.0 for ratio in ratios)]
        print(f"{policy:<18}{row[0]:>10.3f}{row[1]:>10.3f}{row[2]:>7}/{len(cases)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
