"""Speculation beside none: tokens per verify, what drafts and verifies cost, waste, and tokens per second.

python -m bench.drafting [MODEL] [--spec ngram,suffix] [--sets code,quotes] [--batch 1] [--temperature 0] [--pairs 8]

Five sets of prompts (`drafting_prompts/`): code editing, summarising with quotes, multi-turn chat, JSON, free prose;
eight prompts of each in eight variants. A pair is a wave of `batch` requests run both ways in one engine, in turns:
with its drafters, and with every request told to use none. Each wave has a namespace of its own, so that nothing is
known of it from a run before. `--spec` names drafters, with `+` between those that work together; each gets an engine.
`draft=MODEL` says which model drafts.
Ratios are of tokens per second, with drafts over without: medians with quartiles. Texts end where the model ends them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.jump_time import masked
from bench.pairs import in_turns, save, spread
from bench.stopwatch import Stopwatch
from bench.waves import Call, Wave, run_wave
from phloem import Engine, SamplingParams

PROMPTS = Path(__file__).parent / "drafting_prompts"
SETS = ("code", "quotes", "chat", "json", "prose")
WHO = ("Maren", "Tobias", "Ife", "Yuki", "Noor", "Pavel", "Lucia", "Henrik")
HEAD = (
    "| drafters | set | batch | heat | tokens per verify | passes a token | accepted | wasted | draft us a request "
    "| pass: with / without | tok/s without | tok/s with | tok/s: with / without | equal |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Pair(NamedTuple):
    """A wave both ways. `draft_s`: time in the drafters."""

    without: Wave
    drafted: Wave
    draft_s: float


def prompts(name: str) -> list[str]:
    """The 64 prompts of a set in ChatML, each with the beginning of its answer; the eight texts in turn."""
    made = []
    for who in WHO:
        for text in (PROMPTS / f"{name}.txt").read_text().split("\n=====\n"):
            made.append(chat(text.replace("{who}", who)))
    return made


def chat(text: str) -> str:
    """`### role` and what is said, in ChatML. The last turn is the model's, begun or empty."""
    turns = []
    for turn in text.strip().removeprefix("### ").split("\n### "):
        role, _, said = turn.partition("\n")
        turns.append(f"<|im_start|>{role.strip()}\n{said}")
    return "<|im_end|>\n".join(turns)


def waves(engine: Engine, name: str, batch: int, count: int, params: dict[str, Any]) -> list[list[Call]]:
    """`count` waves of `batch` requests, different ones as long as there are any."""
    texts = prompts(name)
    calls = [Call(engine.tokenizer.encode(text), SamplingParams(seed=i, **params)) for i, text in enumerate(texts)]
    return [[calls[(i * batch + j) % len(calls)] for j in range(batch)] for i in range(count)]


def run_pairs(engine: Engine, calls: Sequence[Sequence[Call]], salt: str) -> list[Pair]:
    """Each wave both ways. The clock of the drafters is inside; the loop's thread only."""
    watch, drafting = Stopwatch(), engine.core.parts.drafting
    spent: list[float] = []

    def drafted(i: int) -> Wave:
        before = watch.seconds["draft"]
        wave = run_wave(engine, calls[i], f"{salt}/{i}")
        spent.append(watch.seconds["draft"] - before)
        return wave

    kept, engine.core.scheduler.propose = engine.core.scheduler.propose, watch.timed(drafting.propose_all, "draft")
    try:
        done = in_turns(len(calls), lambda i: masked(engine, calls[i], f"{salt}/{i}/none"), drafted)
    finally:
        engine.core.scheduler.propose = kept
    return [Pair(*both, seconds) for both, seconds in zip(done, spent, strict=True)]


def row(spec: str, name: str, batch: int, heat: float, found: Sequence[Pair]) -> str:
    """A line of the table. A verify is a request's part of a pass that samples, with a draft or without."""
    grew = {
        key: sum(pair.drafted.grew[key] for pair in found)
        for key in ("decode_tokens", "accepted_tokens", "draft_tokens", "steps")
    }
    verifies = grew["decode_tokens"] - grew["accepted_tokens"]
    rates = [[rate(pair.without), rate(pair.drafted)] for pair in found]
    alike = [a == b for pair in found for a, b in zip(pair.without.outputs, pair.drafted.outputs, strict=True)]
    cost = spread([per_pass(pair.drafted) / per_pass(pair.without) for pair in found], ".2f")
    cells = [
        spec, name, str(batch), f"{heat:g}",
        f"{grew['decode_tokens'] / verifies:.2f}",
        f"{grew['steps'] / grew['decode_tokens']:.3f}",
        f"{grew['accepted_tokens']:.0f} of {grew['draft_tokens']:.0f}",
        f"{100 * (1 - grew['accepted_tokens'] / max(1, grew['draft_tokens'])):.0f} %",
        f"{1e6 * sum(pair.draft_s for pair in found) / verifies:.0f}",
        cost,
        spread([without for without, _ in rates], ".1f"),
        spread([drafted for _, drafted in rates], ".1f"),
        spread([drafted / without for without, drafted in rates], ".2f"),
        f"{sum(alike)} of {len(alike)}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def rate(wave: Wave) -> float:
    """Tokens per second, prompts included in the time."""
    return sum(map(len, wave.outputs)) / wave.seconds


def per_pass(wave: Wave) -> float:
    """Seconds of a forward pass and what goes with it, after the first token of each request."""
    return (wave.grew["forward_s"] + wave.grew["sample_s"]) / wave.grew["steps"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--spec", default="ngram,suffix,suffix+ngram")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--batch", default="1,4,16,64", help="requests together")
    parser.add_argument("--temperature", default="0,0.7")
    parser.add_argument(
        "--pairs", type=int, default=8, help="of each line; at least 7 for quartiles that mean something"
    )
    parser.add_argument("--tokens", type=int, default=128, help="at most, a request")
    parser.add_argument("--pool", type=int, help="tokens of KV; default: 768 for each request of the largest batch")
    parser.add_argument("--size", default="adaptive", choices=["adaptive", "fixed"], help="engine.draft_size")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print line by line, and keep the results."""
    options = parse(arguments)
    pool = options.pool or 768 * max(map(int, f"4,{options.batch}".split(",")))
    lines, kept = [HEAD], []
    show(HEAD)
    for spec in options.spec.split(","):
        drafters = [dict(zip(("use", "model"), name.split("="), strict=False)) for name in spec.split("+")]
        sections: dict[str, Any] = {"grammar": "none", "spec": drafters, "engine": {"draft_size": options.size}}
        with Engine(options.model, cache={"tokens": pool}, **sections) as engine:
            for batch in map(int, options.batch.split(",")):
                for heat in map(float, options.temperature.split(",")):
                    for name in options.sets.split(","):
                        params = {"temperature": heat, "max_tokens": options.tokens}
                        calls = waves(engine, name, batch, options.pairs, params)
                        found = run_pairs(engine, calls, f"{name}/{batch}/{heat}")
                        lines.append(row(spec, name, batch, heat, found))
                        show(lines[-1])
                        times = [(pair.without.seconds, pair.drafted.seconds, pair.draft_s) for pair in found]
                        kept.append([spec, name, batch, heat, times])
    show(f"kept as {save('drafting', chr(10).join(lines), options=vars(options), runs=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
