"""Many constrained requests at once on one engine, and what must hold of each result whatever the engine's features."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specimens import Specimen

from phloem import Engine, SamplingParams
from phloem.errors import RequestError
from phloem.results import Output, Result

ALL = {"use": "xgrammar", "also": ["llguidance", "outlines"]}
Got = Result | RequestError


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    specimen: Specimen
    backend: str
    prompt: tuple[int, ...]
    temperature: float
    seed: int
    n: int = 1
    stream: bool = False
    max_tokens: int = 160
    more: tuple[tuple[str, Any], ...] = ()  # further sampling parameters

    @property
    def params(self) -> SamplingParams:
        """As the engine takes it."""
        constraint = {self.specimen.kind: self.specimen.value, "grammar_backend": self.backend}
        numbers = {"temperature": self.temperature, "seed": self.seed, "n": self.n, "max_tokens": self.max_tokens}
        return SamplingParams(**constraint, **numbers, **dict(self.more))

    def with_(self, **changes: Any) -> Ask:
        """A changed copy."""
        return replace(self, **changes)


def asks(specimens: Sequence[Specimen], prompts: Sequence[Sequence[int]]) -> list[Ask]:
    """Each specimen over each backend that has its kind, greedy and hot in turn."""
    made: list[Ask] = []
    for i, specimen in enumerate(specimens):
        for j, backend in enumerate(specimen.backends):
            heat = 1.5 if (i + j) % 2 else 0.0
            prompt = tuple(prompts[i % len(prompts)])
            made.append(Ask(specimen=specimen, backend=backend, prompt=prompt, temperature=heat, seed=i))
    return made


def run(engine: Engine, wanted: Sequence[Ask]) -> list[Got]:
    """All at once. Refusals come as their errors; any other error is raised."""

    async def one(ask: Ask) -> Got:
        try:
            if not ask.stream:
                whole: Result = await engine.agenerate(list(ask.prompt), ask.params)
                return whole
            result = Result([Output(i) for i in range(ask.n)])
            async for delta in engine.astream(list(ask.prompt), ask.params):
                result.usage = delta.usage
                for part in delta.outputs:
                    _fold(result.outputs[part.index], part)
            return result
        except RequestError as error:
            return error

    async def together() -> list[Got]:
        return await asyncio.gather(*map(one, wanted))

    return asyncio.run(together())


def _fold(output: Output, part: Output) -> None:
    assert output.finish_reason is None, "a delta came after the last one"
    output.text += part.text
    output.token_ids += part.token_ids
    output.finish_reason, output.notes = part.finish_reason, part.notes
    if part.logprobs is not None:
        output.logprobs = (output.logprobs or []) + part.logprobs


def judged(wanted: Sequence[Ask], got: Sequence[Got]) -> Counter[str]:
    """Whole outputs are in their languages, refusals name their place. Counts `stop`, `length` and `refused`."""
    counts: Counter[str] = Counter()
    for ask, result in zip(wanted, got, strict=True):
        what = f"{ask.specimen.name} over {ask.backend} at {ask.temperature}"
        if isinstance(result, RequestError):
            assert result.param == ask.specimen.kind, f"{what}: {result}"
            if ask.specimen.kind == "json_schema":
                assert re.search(r"#(/\S+)?: ", str(result)), f"{what} is refused without a place: {result}"
            counts[f"refused by {ask.backend}"] += 1
            continue
        for output in result.outputs:
            counts[output.finish_reason or "none"] += 1
            counts[f"run over {ask.backend}"] += 1
            assert output.finish_reason in ("stop", "length"), what
            if output.finish_reason == "length":
                assert len(output.token_ids) == ask.max_tokens, what
                continue
            try:
                ask.specimen.judge(output.text)
            except Exception as error:
                raise AssertionError(f"{what} wrote {output.text!r}: {error!r}") from error
    return counts


def same(wanted: Sequence[Ask], got: Sequence[Got], plain: Sequence[Got]) -> None:
    """The first choice of each is what the plain engine wrote for one choice, however it was asked for."""
    for ask, mine, theirs in zip(wanted, got, plain, strict=True):
        what = f"{ask.specimen.name} over {ask.backend} at {ask.temperature}"
        if isinstance(theirs, RequestError) or isinstance(mine, RequestError):
            assert str(mine) == str(theirs), what
            continue
        assert mine.token_ids == theirs.token_ids[: ask.max_tokens], what
        whole = len(theirs.token_ids) <= ask.max_tokens
        assert mine.finish_reason == (theirs.finish_reason if whole else "length"), what
        if whole:
            assert mine.text == theirs.text, what
        if ask.temperature == 0.0:
            assert all(output.token_ids == mine.token_ids for output in mine.outputs), what
