"""What each weight precision costs in accuracy: perplexity, and greedy agreement with float32.

    python -m bench.accuracy [MODEL] [--quant none,bf16,int8,int4,gguf] [--prompts 16] [--tokens 64]

Perplexity is that of `accuracy.txt`: stories, articles, letters, code in three languages and JSON, written for this
purpose, so that no model has learnt them by heart. Each of its parts is scored by itself, through `prompt_logprobs`.

Agreement is measured on what the model at float32 (`quant: none`) writes for prompts of W2, greedily: each precision is
given prompt and text; at each position of the text its most likely token is the one that float32 wrote, or it
is not. So a precision is not punished for all that follows its first difference.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.pairs import save
from bench.waves import Tokens, fit
from bench.workloads import load
from phloem import Engine, PhloemError, SamplingParams
from phloem.registry import Registry

TEXT = Path(__file__).parent / "accuracy.txt"
REFERENCE = "none"
HEAD = "| quant | perplexity | over float32 | greedy agreement | positions |\n|---|---|---|---|---|"
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)


class Text(NamedTuple):
    """A prompt and what float32 wrote after it."""

    prompt: Tokens
    written: Tokens


class Accuracy(NamedTuple):
    """One precision. `agreement` is a share of `positions`, the tokens of float32's texts."""

    perplexity: float
    agreement: float
    positions: int


def engine_for(model: str, quant: str, sections: dict[str, Any]) -> Engine:
    """An engine that computes in float32 with weights of this precision, and nothing that could stand between."""
    fixed: dict[str, Any] = {"grammar": "none", "spec": [], "quant": {"use": quant}}
    return Engine(model, **sections, **fixed)


def scored(engine: Engine, tokens: Tokens) -> list[tuple[bool, float]]:
    """Of each token but the first: whether it was the most likely one, and its log-probability."""
    found = engine.generate(tokens, SCORED).prompt_logprobs
    assert found is not None
    return [(each.top[0][0] == each.token_id, each.logprob) for each in found if each is not None]


def perplexity(engine: Engine, parts: Sequence[str], longest: int) -> float:
    """e to the mean negative log-probability of a token, over all parts; each begins anew and is cut at `longest`."""
    longest = min(longest, engine.core.info.max_total_tokens - 1)
    values = [value for part in parts for _, value in scored(engine, engine.tokenizer.encode(part)[:longest])]
    return math.exp(-sum(values) / len(values))


def written(engine: Engine, prompts: int, tokens: int) -> list[Text]:
    """What the engine writes after prompts of W2."""
    asked = fit(engine, load("W2", 1)["prompts"][:prompts])
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        Text(prompt, result.token_ids) for prompt, result in zip(asked, engine.generate(asked, params), strict=True)
    ]


def measure(engine: Engine, texts: Sequence[Text], parts: Sequence[str], longest: int) -> Accuracy:
    """Both figures of one engine."""
    alike = [same for text in texts for same, _ in scored(engine, text.prompt + text.written)[-len(text.written) :]]
    return Accuracy(perplexity(engine, parts, longest), sum(alike) / len(alike), len(alike))


def row(quant: str, found: Accuracy, reference: Accuracy) -> str:
    """A line of the table."""
    return (
        f"| {quant} | {found.perplexity:.3f} | {100 * (found.perplexity / reference.perplexity - 1):+.2f} % "
        f"| {100 * found.agreement:.2f} % | {found.positions} |"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--quant", default="none,bf16,int8,int4,gguf", help="those that are not installed are left out")
    parser.add_argument("--prompts", type=int, default=16, help="of W2, at most 32")
    parser.add_argument("--tokens", type=int, default=64, help="that float32 writes after each")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a part of the text that are scored")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> int:
    """Measure one precision after the other, print a Markdown table, and keep the figures."""
    options = parse(arguments)
    parts = TEXT.read_text().split("\n=====\n")
    sections: dict[str, Any] = {"model": {"dtype": "float32"}, "cache": {"tokens": 8192}}
    with engine_for(options.model, REFERENCE, sections) as engine:
        texts = written(engine, options.prompts, options.tokens)
        reference = measure(engine, texts, parts, options.longest)
    lines, kept, installed = [HEAD], {REFERENCE: reference}, Registry().names("quant")
    show(HEAD)
    for quant in [name for name in options.quant.split(",") if name in installed]:
        try:
            if quant != REFERENCE:
                with engine_for(options.model, quant, sections) as engine:
                    kept[quant] = measure(engine, texts, parts, options.longest)
            lines.append(row(quant, kept[quant], reference))
        except PhloemError as error:
            lines.append(f"| {quant} | refused: {str(error).splitlines()[0]} | | | |")
        show(lines[-1])
    show(f"kept as {save('accuracy', chr(10).join(lines), options=vars(options), found=kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
