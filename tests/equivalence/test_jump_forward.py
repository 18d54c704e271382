"""Jump-forward changes no output: tokens with the grammar's own drafts are those without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from equivalence.harness import TOYS, engine, pairwise, prompts
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


@pytest.mark.parametrize(
    ("other", "temperature"),
    [("Right", 0.0), ("Right", 1.0), ("Wrong", 1.0), ("Tree", 1.0), ("Ngram", 0.0), ("Raises", 0.0), ("Nonsense", 0.0)],
)
def test_other_drafters_continue_it(tiny_model: Callable[[str], Path], other: str, temperature: float) -> None:
    """Named before or after: the grammar leads, the other goes on behind its chain, and no token changes."""
    llama = tiny_model("llama")
    params = SamplingParams(max_tokens=60, regex=PATTERN, temperature=temperature, seed=3)
    plain, _ = run(llama, params, grammar=TOY, spec=[])
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    alone = run(llama, params, grammar=TOY)[1]
    more = {"use": f"{TOYS}:{other}", "texts": texts}
    for spec in ([more, {"use": "grammar"}], [{"use": "grammar"}, more]):
        tokens, accepted = run(llama, params, grammar=TOY, spec=spec)
        assert tokens == plain
        assert accepted > alone or other != "Right"


def test_nothing_is_written_past_a_bound(tiny_model: Callable[[str], Path]) -> None:
    """Forced text that runs over max_tokens, a stop string or a stop token is cut where plain decoding is cut."""
    llama, regex = tiny_model("llama"), r"a(b|c), and so on and so on and so on, and no more"
    with engine(llama, grammar=TOY, spec=[]) as plain, engine(llama, grammar=TOY) as drafted:
        whole = plain.generate(PROMPTS[0], SamplingParams(regex=regex, temperature=0.0, max_tokens=80))
        bounds: list[dict[str, Any]] = [{"max_tokens": n} for n in range(1, 12)]
        bounds += [{"stop": ["so on a"]}, {"stop": ["on", "d"], "include_stop": True}, {"stop_regex": ["so.on,"]}]
        bounds += [{"stop_token_ids": [token]} for token in sorted(set(whole.token_ids))[:6]]
        for bound in bounds:
            params = SamplingParams(**{"regex": regex, "temperature": 0.0, "max_tokens": 80, **bound})
            mine, theirs = (running.generate(PROMPTS[0], params) for running in (drafted, plain))
            assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids), bound
            assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason), bound
            assert mine.usage.completion_tokens == theirs.usage.completion_tokens, bound
        assert drafted.stats()["accepted_tokens"] > 100


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
        result = running.generate(PROMPTS[0], SamplingParams(max_tokens=60, regex=PATTERN, temperature=0.0))
        stats = running.stats()
        assert stats["accepted_tokens"] == stats["draft_tokens"] > 0
        assert result.outputs[0].notes == ["forced text was accepted without asking the model (forcing: canonical)"]


@pytest.mark.real
def test_the_default_model_writes_the_same_in_fewer_passes() -> None:
    params = SamplingParams(max_tokens=60, json_schema=SCHEMA, temperature=0.0)
    texts = ["An order as JSON:", "Write the invoice.", "größe:", "{", "Yesterday we sold"]
    written, steps = [], []
    for spec in ([], [{"use": "grammar"}]):
        with Engine("smollm2-135m", cache={"tokens": 2048}, spec=spec) as running:
            written.append([result.token_ids for result in running.generate(texts, params)])
            steps.append(running.stats()["steps"])
    assert written[0] == written[1]
    assert steps[1] < 0.7 * steps[0]
