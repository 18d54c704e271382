"""What equivalence tests of drafters have in common: what they run, and what must hold whatever drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phloem import SamplingParams
from phloem.results import Result

from .harness import engine, serve

COUNT = 24  # tokens of an answer
TOY = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"((the|a) (quick|slow) (fox|dog)s?( and so on)?, ){1,3}end\."
STOPS: list[tuple[str, ...]] = [(), (" fox", "e", "the ")]
# grammar, stop strings, logprobs, streamed, n, temperature, page size
KINDS: tuple[list[Any], ...] = ([None, PATTERN], STOPS, [None, 2], [False, True], [1, 3], [0.0, 0.9], [1, 4])
Spec = list[dict[str, Any]]


def some(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """A hundred of all combinations; the same on every call."""
    return random.Random(3).sample(list(itertools.product(*axes)), 100)


def run_features(
    folder: Path, asked: Sequence[list[int]], spec: Spec, cache: dict[str, Any], chunk: int, overlap: str, size: str
) -> dict[str, Any]:
    """Greedy, cold and cached, against transformers. Returns the engine's statistics."""
    sections: dict[str, Any] = {
        "cache": cache,
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap, "draft_size": size},
        "spec": spec,
    }
    with engine(folder, **sections) as running:
        for _ in range(2):
            for result in serve(running, folder, asked, COUNT):
                assert result.usage.completion_tokens == COUNT
        running.check()
        stats = dict(running.stats())
    assert stats["drafter_failures"] == {}
    return stats


def run_kind(
    folder: Path,
    asked: Sequence[list[int]],
    spec: Spec,
    regex: str | None,
    stop: tuple[str, ...],
    logprobs: int | None,
    streamed: bool,
    n: int,
    heat: float,
    page: int,
    verify: str = "match",
) -> None:
    """Seeded requests against the same engine without drafters, so `rejection` verifies them as `match` does."""
    params = SamplingParams(
        temperature=heat, seed=7, n=n, max_tokens=40, ignore_eos=regex is None, regex=regex, stop=list(stop),
        logprobs=logprobs, repetition_penalty=1.0 if n == 1 else 1.1,
    )  # fmt: skip

    def run(drafters: Spec, how: str) -> tuple[list[Result], list[Any], dict[str, Any]]:
        sections: dict[str, Any] = {"cache": {"page_size": page}, "engine": {"verify": how}}
        with engine(folder, grammar=TOY, spec=drafters, **sections) as running:
            deltas: list[Any] = []
            for prompt in asked if streamed else []:
                outputs = [piece.outputs[0] for piece in running.stream(prompt, params)]
                for i in range(n):
                    own = [output for output in outputs if output.index == i]
                    deltas.append(("".join(o.text for o in own), [t for o in own for t in o.token_ids]))
            results = running.generate(asked, params)
            if streamed:  # a character that was split would read otherwise
                whole = [(output.text, output.token_ids) for result in results for output in result.outputs]
                assert deltas == whole
            running.check()
            return results, deltas, dict(running.stats())

    plain, streams, _ = run([], "match")
    drafted, streams_too, stats = run(spec, verify)
    assert told(drafted) == told(plain)
    assert streams_too == streams
    if logprobs is not None:
        assert logprobs_of(drafted) == pytest.approx(logprobs_of(plain), abs=1e-3)
    assert stats["drafter_failures"] == {}
    longest = max(len(output.token_ids) for result in plain for output in result.outputs)
    assert stats["draft_tokens"] > 0 or longest < 16  # a stop string may end all before anything repeats


def told(results: Sequence[Result]) -> list[Any]:
    """All that a caller is told, but for log-probabilities."""
    rows = [
        (output.token_ids, output.text, output.finish_reason, output.stop_reason)
        for result in results
        for output in result.outputs
    ]
    return [*rows, *(result.usage.completion_tokens for result in results)]


def logprobs_of(results: Sequence[Result]) -> list[float]:
    """Of every emitted token and its alternatives."""
    found: list[float] = []
    for output in (output for result in results for output in result.outputs):
        assert output.logprobs is not None
        assert [each.token_id for each in output.logprobs] == output.token_ids
        found += [value for each in output.logprobs for value in (each.logprob, *(p for _, p in each.top))]
    return found
