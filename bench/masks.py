"""What a grammar costs inside a step: filling masks, applying them, choosing, and the head with and without columns.

python -m bench.masks [MODEL] [--grammar xgrammar]. Requests stand at points spread over one document of W6's schema;
figures are microseconds of one thread's time per step, medians over rounds, so that other work on the machine does not
count. `whole` is the sampler on whole rows (mask and argmax), `few` the same with the table of few tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.workloads import load
from phloem import filters, noise
from phloem.batch import Segment
from phloem.constraint import Constraint
from phloem.interfaces import Grammar, Matcher, PluginContext
from phloem.masks import MaskFiller
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.registry import build
from phloem.request import Request
from phloem.sampler import FEW_TOKENS, Sampler
from phloem.tokenizer import Tokenizer

ROWS = (1, 4, 16, 64)
COLUMNS = (1, 8, 32, 64, 128, 256, 512)
DOCUMENT = {
    "name": "Maria Ruiz", "age": 41, "active": True, "role": "admin", "tags": ["new", "paid"],
    "address": {"city": "Lisbon", "zip": 11990},
}  # fmt: skip


def micros(work: Callable[[], object], rounds: int) -> float:
    """Median time of this thread in one call."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return statistics.median(times) * 1e6


def matchers(grammar: Grammar, tokens: Sequence[int], count: int) -> list[Matcher]:
    """`count` matchers, each after another part of a document."""
    constraint = Constraint(kind="json_schema", value=json.dumps(load("W6g", 0)["schema"]))
    start = grammar.matcher(constraint, grammar.compile(constraint))
    made = []
    for i in range(count):
        matcher = start.fork()
        for token in tokens[: (2 * i + 1) * len(tokens) // (2 * count)]:
            if not matcher.accept(token):
                raise ValueError("the document does not follow the schema")
        made.append(matcher)
    return made


def segments(made: Sequence[Matcher]) -> list[Segment]:
    """Greedy decode segments, one a matcher."""
    out = []
    for i, matcher in enumerate(made):
        call = GenerateCall(call_id=f"{i}", prompt=[1, 2], params=SamplingParams(temperature=0.0))
        request = Request(call, 0, seed=i, limit=1000, arrival=i, matcher=matcher)
        out.append(Segment(request, 1, 1, True))
    return out


def step(model: Any, made: Sequence[Matcher], rounds: int) -> list[str]:
    """One line of the table."""
    rows, vocab = len(made), model.spec.vocab_size
    work, hidden = segments(made), torch.randn(rows, model.arch.hidden)
    filler, sampler = MaskFiller(vocab, torch.device("cpu")), Sampler(vocab, {})
    masks = filler.fill(work)
    assert masks is not None, "the requests are constrained"
    logits = model.logits(hidden)

    def known(full: Sequence[int], few: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return filters.picked(logits, full), [logits[row, tokens] for row, tokens in few]

    def sparse(full: Sequence[int], few: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        wanted.append((list(full), list(few)))
        return known(full, few)

    wanted: list[Any] = []
    sampler.start(sparse, work, masks)
    full, few = wanted[0]
    scores = filters.masked(logits, range(rows), masks.bits)
    figures = [
        micros(lambda: filler.fill(work), rounds),
        micros(lambda: filters.masked(logits, range(rows), masks.bits), rounds),
        micros(lambda: noise.winners(scores), rounds),
        micros(lambda: sampler.start(known, work, masks), rounds),
        micros(lambda: model.logits(hidden), rounds // 4),
        micros(lambda: [model.logits(hidden[full]) if full else 0, *(model.logits_at(hidden[r], t) for r, t in few)],
               rounds // 4),
    ]  # fmt: skip
    kinds = f"{rows - len(full) - len(few)} / {len(few)} / {len(full)}"
    return [str(rows), kinds, *(f"{figure:,.0f}" for figure in figures)]


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print two Markdown tables: a step by its rows, and columns of the head by their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--grammar", default="xgrammar")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    extras = {"path": options.model, "quant": build("quant", "none", PluginContext("quant", "none"))}
    model: Any = build("model", "native", PluginContext("model", "native", extras=extras))
    tokenizer = Tokenizer(model.tokenizer)
    context = PluginContext("grammar", options.grammar, model=model.spec, tokenizer=tokenizer)
    grammar: Grammar = build("grammar", options.grammar, context)
    tokens = tokenizer.encode(json.dumps(DOCUMENT))
    show("| rows | certain / few / whole | fill | mask | argmax | sampler | whole head | sparse head |")
    show("|---|---|---|---|---|---|---|---|")
    for rows in ROWS:
        show("| " + " | ".join(step(model, matchers(grammar, tokens, rows), options.rounds)) + " |")
    hidden, generator = torch.randn(9, model.arch.hidden), torch.Generator().manual_seed(0)
    more = micros(lambda: model.logits(hidden), 12) - micros(lambda: model.logits(hidden[:5]), 12)
    show(f"\none more row of the whole head: {more / 4:,.0f}; columns are asked for up to {FEW_TOKENS} tokens\n")
    show("| columns | microseconds |\n|---|---|")
    for count in COLUMNS:
        picks = torch.randperm(model.spec.vocab_size, generator=generator)
        starts = itertools.cycle(range(0, len(picks) - count, count))  # others each time: none is in a cache

        def columns(picks: torch.Tensor = picks, starts: Iterator[int] = starts, count: int = count) -> None:
            at = next(starts)
            model.logits_at(hidden[0], picks[at : at + count])

        cost = micros(columns, options.rounds)
        show(f"| {count} | {cost:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
