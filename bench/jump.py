"""Jump-forward in tokens per forward pass: W6's schema and ten schemas of real kinds, with and without.

python -m bench.jump [MODEL] [--grammar xgrammar] [--rounds 2]

Greedy, one request at a time, all in one engine; the outputs with and without drafts are asserted to be equal. Counts
only: no clock. `passes` are forward passes, the one over the prompt among them. `blind` is the share of forced tokens,
cut as the tokenizer cuts them and held back at the edge, that the model wrote there itself: what a jump that asks
nobody would have got right. In the second round the drafter has seen these schemas before.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.workloads import load
from phloem import Engine, SamplingParams
from phloem.constraint import Constraint
from phloem.interfaces import DraftContext, Grammar, PluginContext
from phloem.plugins.spec.grammar import GrammarDrafter
from phloem.registry import build
from phloem.request import Namespace

SCHEMAS = Path(__file__).parent / "schemas"
DOCUMENT_TOKENS = 400
HEAD = (
    "| schema | tokens | passes without | passes | tokens a pass | proposed | accepted | wasted a pass | blind |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Job(NamedTuple):
    """One document to write."""

    name: str
    prompt: list[int] | str
    schema: dict[str, Any]
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, json_schema=self.schema)


class Counts(NamedTuple):
    """What one document, or several, took. `asked` and `right`: forced tokens, and those the model wrote."""

    tokens: int = 0
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    asked: int = 0
    right: int = 0

    def __add__(self, other: Any) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def row(self, name: str) -> str:
        """A line of the table. Without drafts every token takes a pass."""
        accepted, blind = self.accepted / max(self.proposed, 1), self.right / max(self.asked, 1)
        wasted = (self.proposed - self.accepted) / self.passes
        figures = f"{self.tokens / self.passes:.2f} | {self.proposed} | {accepted:.0%} | {wasted:.1f} | {blind:.0%}"
        return f"| {name} | {self.tokens} | {self.tokens} | {self.passes} | {figures} |"


def jobs(prompts: int = 16) -> tuple[list[Job], list[Job]]:
    """W6's prompts, and one prompt for each of the ten schemas."""
    data = load("W6g", 1)
    first = [Job("W6", prompt, data["schema"], data["max_tokens"]) for prompt in data["prompts"][:prompts]]
    cases = [(path.stem, json.loads(path.read_text())) for path in sorted(SCHEMAS.glob("*.json"))]
    return first, [Job(name, case["prompt"], case["schema"], DOCUMENT_TOKENS) for name, case in cases]


def blind(engine: Engine, grammar: Grammar, job: Job, tokens: Sequence[int]) -> tuple[int, int]:
    """Forced tokens of a document as a blind jump would write them, and how many of them the model wrote."""
    constraint = Constraint(kind="json_schema", value=json.dumps(job.schema))
    matcher = grammar.matcher(constraint, grammar.compile(constraint))
    context = PluginContext("spec", "grammar", model=engine.core.info.spec, tokenizer=engine.tokenizer)
    drafter = GrammarDrafter(GrammarDrafter.Options(forcing="canonical", max_tokens=64), context)
    prompt = engine.tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt
    text, at, asked, right = array("i", prompt), 0, 0, 0
    while at < len(tokens):
        draft = drafter.propose(DraftContext("", text, len(prompt), Namespace(), matcher, job.params), 64)
        forced = draft.tokens[: draft.forced] if draft is not None else ()
        same = next((i for i, pair in enumerate(zip(forced, tokens[at:], strict=False)) if len(set(pair)) > 1), None)
        agreed = min(len(forced), len(tokens) - at) if same is None else same
        asked, right = asked + min(len(forced), len(tokens) - at), right + agreed
        taken = tokens[at : at + max(agreed, 1)]
        for token in taken:
            matcher.accept(token)
        text.extend(taken)
        at += len(taken)
    return asked, right


def write(engine: Engine, job: Job) -> tuple[list[int], Counts]:
    """One document, and what the engine counted meanwhile."""
    before = engine.stats()
    tokens = engine.generate(job.prompt, job.params).token_ids
    after = engine.stats()
    passes, proposed, accepted = (after[key] - before[key] for key in ("steps", "draft_tokens", "accepted_tokens"))
    return tokens, Counts(len(tokens), passes, int(proposed), int(accepted))


def table(engine: Engine, grammar: Grammar, plain: dict[str, list[list[int]]], work: Sequence[Sequence[Job]]) -> str:
    """Write all documents and compare them with what was written without drafts."""
    lines = [HEAD]
    for group in work:
        sums: dict[str, Counts] = {}
        seen: dict[str, int] = {}
        for job in group:
            tokens, counts = write(engine, job)
            place = seen[job.name] = seen.get(job.name, -1) + 1
            assert tokens == plain[job.name][place], f"{job.name} {place}: jump-forward changed the output"
            asked, right = blind(engine, grammar, job, tokens)
            sums[job.name] = sums.get(job.name, Counts()) + counts._replace(asked=asked, right=right)
        lines += [counts.row(name) for name, counts in sums.items()]
        if len(sums) > 1:
            total = sum(sums.values(), Counts())
            mean = sum(counts.tokens / counts.passes for counts in sums.values()) / len(sums)
            lines.append(total.row(f"**the {len(sums)}**, mean {mean:.2f}"))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Print a table a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--grammar", default="xgrammar")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16, help="of W6")
    options = parser.parse_args(arguments)
    work = jobs(options.prompts)
    sections: dict[str, Any] = {"cache": {"tokens": 8192}, "grammar": {"use": options.grammar}}
    plain: dict[str, list[list[int]]] = {}
    with Engine(options.model, spec=[], **sections) as engine:
        for job in [job for group in work for job in group]:
            plain.setdefault(job.name, []).append(write(engine, job)[0])
    with Engine(options.model, **sections) as engine:
        context = PluginContext("grammar", options.grammar, model=engine.core.info.spec, tokenizer=engine.tokenizer)
        grammar: Grammar = build("grammar", engine.config.grammar, context)
        for turn in range(1, options.rounds + 1):
            show(f"Round {turn}\n\n{table(engine, grammar, plain, work)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
