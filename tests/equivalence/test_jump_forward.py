"""Jump-forward changes no output: tokens with the grammar's own drafts are those without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from equivalence.harness import engine, pairwise, prompts
from phloem import Engine, SamplingParams

TOY = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"\{'order(Id|Name)': '(é|世|yes)+', 'and so on': (true|false)\}"
PROMPTS = prompts(4, high=30)
SCHEMA = {
    "type": "object",
    "properties": {
        "orderId": {"type": "integer", "minimum": 1, "maximum": 9999},
        "größe": {"enum": ["klein", "groß", "世界"]},
        "paid": {"type": "boolean"},
    },
    "required": ["orderId", "größe", "paid"],
    "additionalProperties": False,
}


def run(folder: Path | str, params: SamplingParams, **sections: Any) -> tuple[list[list[int]], int]:
    """Tokens of all prompts, and the drafts accepted."""
    with engine(folder, **sections) as running:
        results = running.generate(PROMPTS, params)
        running.check()
        return [result.token_ids for result in results], running.stats()["accepted_tokens"]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_tokens_are_those_without_drafts(tiny_model: Callable[[str], Path], kind: dict[str, Any]) -> None:
    llama, params = tiny_model("llama"), SamplingParams(max_tokens=60, regex=PATTERN, **kind)
    plain, accepted = run(llama, params, grammar=TOY, spec=[])
    assert not accepted
    for page, chunk, overlap, pool in pairwise([1, 4], [3, 64], ["off", "on"], [4096, 128]):
        sections = {"cache": {"page_size": page, "tokens": pool}, "schedule": {"chunk": chunk}}
        tokens, accepted = run(llama, params, grammar=TOY, engine={"overlap": overlap}, **sections)
        assert tokens == plain, sections
        assert accepted > 20


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines"])
def test_every_backend_with_and_without(tiny_model: Callable[[str], Path], backend: str) -> None:
    """Greedy and hot, valid whenever it is whole; what is cut says so."""
    llama = tiny_model("llama")
    for kind in ({"temperature": 0.0}, {"temperature": 1.5, "seed": 7}):
        params = SamplingParams(max_tokens=120, json_schema=SCHEMA, **kind)
        plain, _ = run(llama, params, grammar={"use": backend}, spec=[])
        assert run(llama, params, grammar={"use": backend})[0] == plain, kind
        with engine(llama, grammar={"use": backend}) as running:
            for result in running.generate(PROMPTS, params):
                if result.finish_reason == "stop":
                    jsonschema.validate(json.loads(result.text), SCHEMA)
                else:
                    assert result.finish_reason == "length"


def test_canonical_forcing_says_so(tiny_model: Callable[[str], Path]) -> None:
    spec = [{"use": "grammar", "forcing": "canonical"}]
    with engine(tiny_model("llama"), grammar=TOY, spec=spec) as running:
        running.generate(PROMPTS[0], SamplingParams(max_tokens=60, regex=PATTERN, temperature=0.0))
        stats = running.stats()
        assert stats["accepted_tokens"] == stats["draft_tokens"] > 0


@pytest.mark.real
def test_the_default_model_writes_the_same_in_fewer_passes() -> None:
    params = SamplingParams(max_tokens=60, json_schema=SCHEMA, temperature=0.0)
    texts = ["An order as JSON:", "Write the invoice.", "größe:"]
    written, steps = [], []
    for spec in ([], [{"use": "grammar"}]):
        with Engine("smollm2-135m", cache={"tokens": 2048}, spec=spec) as running:
            written.append([result.token_ids for result in running.generate(texts, params)])
            steps.append(running.stats()["steps"])
    assert written[0] == written[1]
    assert steps[1] < 0.7 * steps[0]
