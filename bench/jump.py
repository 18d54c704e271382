"""Jump-forward in tokens per forward pass: W6's schema and ten schemas of real kinds, with and without.

python -m bench.jump [--model smollm2-135m] [--backend xgrammar] [--max-tokens 256]

Greedy, one request at a time; the outputs of both ways are asserted to be equal. Counts only: no clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.workloads import load
from phloem import Engine, SamplingParams

SCHEMAS = Path(__file__).parent / "schemas"
Job = tuple[str, Any, dict[str, Any]]  # name, prompt, schema


def jobs() -> list[Job]:
    """W6's first prompts, then one prompt per schema."""
    data = load("W6", 1)
    made: list[Job] = [(f"W6 {i}", prompt, data["schema"]) for i, prompt in enumerate(data["prompts"][:6])]
    for path in sorted(SCHEMAS.glob("*.json")):
        case = json.loads(path.read_text())
        made.append((path.stem, case["prompt"], case["schema"]))
    return made


def run(engine: Engine, job: Job, max_tokens: int) -> tuple[list[int], dict[str, float]]:
    """One document: its tokens, and what the engine counted meanwhile."""
    before = engine.stats()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, json_schema=job[2])
    tokens = engine.generate(job[1], params).token_ids
    after = engine.stats()
    return tokens, {name: after[name] - before[name] for name in ("steps", "draft_tokens", "accepted_tokens")}


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="bench.jump", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args(argv)
    results: list[list[tuple[list[int], dict[str, float]]]] = []
    sections: dict[str, Any] = {"cache": {"tokens": 4096}, "grammar": {"use": options.backend}}
    for spec in ([], [{"use": "grammar"}]):
        with Engine(options.model, spec=spec, **sections) as engine:
            results.append([run(engine, job, options.max_tokens) for job in jobs()])
    print("| schema | tokens | passes | tokens per pass | proposed | accepted |\n|---|---|---|---|---|---|")
    totals: dict[bool, list[float]] = {True: [0, 0], False: [0, 0]}
    for job, (plain, _), (tokens, counts) in zip(jobs(), *results, strict=True):
        assert tokens == plain, f"{job[0]}: jump-forward changed the output"
        passes, proposed, accepted = counts["steps"], counts["draft_tokens"], counts["accepted_tokens"]
        share = f"{accepted / proposed:.0%}" if proposed else "-"
        print(f"| {job[0]} | {len(tokens)} | {passes:.0f} | {len(tokens) / passes:.2f} | {proposed:.0f} | {share} |")
        total = totals[job[0].startswith("W6")]
        total[0] += len(tokens)
        total[1] += passes
    for w6, (written, passes) in totals.items():
        print(f"{'W6' if w6 else 'the others'}: {written / max(passes, 1):.2f} tokens per pass")
    return 0


if __name__ == "__main__":
    sys.exit(main())
