"""What a grammar costs a whole run: W6 with its schema against the same prompts at the same lengths without one.

python -m bench.grammar [MODEL] [--batch 16] [--rounds 6] [--backend xgrammar]

No drafter. The two runs of a round follow each other in one engine, the order alternating; the schema is compiled
before. A ratio above 1 is the cost of the grammar in wall time. The last two runs are timed inside: `masks` is the
filling of bitmasks, `matchers` all else that is asked of a grammar (a token accepted, the end noticed), the others are
the engine's own times. `sample` holds the output head: under a grammar most tokens need few of its rows or none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.pairs import in_turns, save, spread
from bench.stopwatch import Stopwatch
from bench.waves import Call, Wave, fit, run_wave
from bench.workloads import load
from phloem import Engine, SamplingParams
from phloem.interfaces import Matcher

MEASURED = (1, 2, 3)  # variants of the workload
MATCHER = ("fill", "accept", "rollback", "is_complete", "forced", "fork")
SPANS = ("plan", "build", "forward", "sample", "commit")


class Both(NamedTuple):
    """The calls of one variant: under the schema, and as long without."""

    masked: list[Call]
    free: list[Call]


class Proxy:
    """A matcher whose methods are timed; backends' own classes may have slots."""

    def __init__(self, matcher: Matcher, watch: Stopwatch) -> None:
        for name in MATCHER:
            setattr(self, name, watch.timed(getattr(matcher, name), "matchers"))


def variant(engine: Engine, number: int, batch: int, max_tokens: int) -> Both:
    """A variant's calls. Runs those under the schema once, for their lengths: compiles it, and warms up."""
    data = load("W6g", number)
    prompts = fit(engine, data["prompts"][:batch])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, json_schema=data["schema"])
    masked = [Call(prompt, params) for prompt in prompts]
    lengths = [len(output) for output in run_wave(engine, masked).outputs]
    free = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    return Both(masked, [Call(*pair) for pair in zip(prompts, free, strict=True)])


def inside(engine: Engine, both: Both) -> list[dict[str, float]]:
    """Seconds of a run without the grammar and of one with it, by what they were spent on."""
    watch, parts = Stopwatch(), engine.core.parts
    watch.wrap(parts.executor._masks, ("fill",), "masks")
    matcher = parts.grammars.matcher

    def proxied(*args: Any) -> Any:
        made = matcher(*args)
        return None if made is None else Proxy(made, watch)

    parts.grammars.matcher = proxied  # type: ignore[method-assign, assignment]
    found = []
    for calls in (both.free, both.masked):
        watch.seconds.clear()
        wave = run_wave(engine, calls)
        spans = {name: wave.grew[f"{name}_s"] for name in SPANS}
        commit = spans["commit"] - watch.seconds["matchers"]  # which are asked while tokens are committed
        known = {"masks": watch.seconds["masks"], "matchers": watch.seconds["matchers"], **spans, "commit": commit}
        found.append({"wall": wave.seconds, **known, "rest": wave.seconds - sum(known.values())})
    return found


def table(runs: list[tuple[Wave, Wave]], times: list[dict[str, float]]) -> str:
    """The ratio, and where the time goes."""
    ratio = spread([masked.seconds / free.seconds for masked, free in runs])
    tokens = [sum(map(len, wave.outputs)) for wave in runs[0]]
    free, masked = times
    share = (masked["masks"] + masked["matchers"]) / masked["wall"]
    lines = [
        f"with / without the grammar, wall time: **{ratio}**; {tokens[0]} tokens a run with, {tokens[1]} without",
        f"masks and matchers: **{share:.2%}** of the wall time",
        "",
        f"| ms | {' | '.join(masked)} |",
        "|---" * (len(masked) + 1) + "|",
        *(f"| {name} | {' | '.join(f'{1e3 * each:.1f}' for each in row.values())} |"
          for name, row in (("without", free), ("with", masked))),
    ]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Run, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--batch", type=int, default=16, help="requests together, at most 16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96, help="at most, a document")
    options = parser.parse_args(arguments)
    with Engine(options.model, spec=[], cache={"tokens": 8192}, grammar={"use": options.backend}) as engine:
        numbers = MEASURED[: options.rounds]
        work = [variant(engine, number, options.batch, options.tokens) for number in numbers]
        run_wave(engine, work[0].free)
        runs = in_turns(
            options.rounds,
            lambda i: run_wave(engine, work[i % len(work)].masked),
            lambda i: run_wave(engine, work[i % len(work)].free),
        )
        times = inside(engine, work[0])
    text = table(runs, times)
    seconds = [[masked.seconds, free.seconds] for masked, free in runs]
    show(text)
    show(f"kept as {save('grammar', text, options=vars(options), seconds=seconds, inside=times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
