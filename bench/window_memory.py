"""What a long conversation with a windowed model holds: `swa`, where windows let go of old tokens, beside holding all.

    python -m bench.window_memory [MODEL] [--turns 12] [--user 400] [--output 40] [--threads 2]

One conversation of random user turns and greedy answers, each turn continued from the cache. Per turn: tokens so far,
how many of its prompt were found, and KV in use (requests' and cached, evictable included) in MiB, beside what the same
tokens take in all layers. At the end: the pools' bytes, beside a pool that keeps as many tokens of every layer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import NamedTuple

from phloem import Engine, SamplingParams

MIB = 1024**2
_LEAST = 4096  # tokens of the pool: it must hold a window


class Turn(NamedTuple):
    """A line of the table; KV in bytes."""

    tokens: int
    prompt: int
    cached: int
    used: int
    everything: int


def slot_bytes(engine: Engine) -> list[int]:
    """Bytes of one slot, per group."""
    kv = engine.core.ledger.kv
    each = [0] * len(engine.core.ledger.pools)
    for group, keys, values in zip(kv.group_of, kv.keys, kv.values, strict=True):
        each[group] += sum(t[0].numel() * t.element_size() for t in (keys, values))
    return each


def converse(engine: Engine, turns: int, user: int, output: int, seed: int) -> list[Turn]:
    """Run the conversation; every turn's prompt is all that was said before, and the user's new tokens."""
    rng, each = random.Random(seed), slot_bytes(engine)
    vocab = min(engine.core.info.spec.vocab_size, 50_000)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    text: list[int] = []
    table = []
    for _ in range(turns):
        text += rng.choices(range(10, vocab), k=user)
        prompt = len(text)
        result = engine.generate(text, params)
        text += result.token_ids
        groups = engine.stats()["groups"]
        used = sum((group["total"] - group["free"]) * size for group, size in zip(groups, each, strict=True))
        table.append(Turn(len(text), prompt, result.usage.cached_tokens, used, (len(text) - 1) * sum(each)))
    return table


def report(engine: Engine, table: list[Turn]) -> str:
    """The table as Markdown, and the pools."""
    each = slot_bytes(engine)
    lines = ["| tokens | prompt | found | KV in use, MiB | all layers, MiB |", "|---|---|---|---|---|"]
    for turn in table:
        used, everything = turn.used / MIB, turn.everything / MIB
        lines.append(f"| {turn.tokens:,} | {turn.prompt:,} | {turn.cached:,} | {used:.1f} | {everything:.1f} |")
    pools = [pool.total for pool in engine.core.ledger.pools]
    held = sum(total * size for total, size in zip(pools, each, strict=True))
    whole = max(pools) * sum(each)
    lines += [
        "",
        f"pools of {' + '.join(f'{total:,}' for total in pools)} slots: {held / MIB:.1f} MiB, "
        f"{held / whole:.1%} of the {whole / MIB:.1f} MiB that keep {max(pools):,} tokens of every layer",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--cache", default="swa")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--user", type=int, default=400)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    tokens = max(_LEAST, args.turns * (args.user + args.output))
    with Engine(
        args.model,
        grammar="none",
        cache={"use": args.cache, "tokens": tokens, "window_every": tokens},
        schedule={"max_running": 1, "max_tokens_per_step": 256, "chunk": 256},
        engine={"threads": args.threads},
    ) as engine:
        print(report(engine, converse(engine, args.turns, args.user, args.output, args.seed)))


if __name__ == "__main__":
    main()
