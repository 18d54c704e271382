"""Jump-forward changes no output: tokens with the grammar's own drafts are those without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


GREEDY = SamplingParams(max_tokens=60, regex=PATTERN, temperature=0.0)
SEEDED = SamplingParams(max_tokens=60, regex=PATTERN, temperature=1.0, seed=3)


def run(folder: Path | str, *params: SamplingParams, **sections: Any) -> tuple[list[list[int]], int]:
    """Tokens of all prompts under each parameters in turn, and the drafts accepted."""
    with engine(folder, **sections) as running:
        results = [result for own in params for result in running.generate(PROMPTS, own)]
        running.check()
        return [result.token_ids for result in results], running.stats()["accepted_tokens"]


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[[str], Path]) -> list[list[int]]:
    """What is written without drafts: greedy, then seeded."""
    tokens, accepted = run(tiny_model("llama"), GREEDY, SEEDED, grammar=TOY, spec=[])
    assert not accepted
    return tokens


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[[str], Path]) -> dict[float, int]:
    """How many drafts are accepted, by temperature, where the grammar is the only drafter."""
    return {own.temperature: run(tiny_model("llama"), own, grammar=TOY)[1] for own in (GREEDY, SEEDED)}


@pytest.mark.parametrize(("page", "chunk", "overlap", "pool"), pairwise([1, 4], [3, 64], ["off", "on"], [4096, 128]))
def test_tokens_are_those_without_drafts(
    tiny_model: Callable[[str], Path], plain: list[list[int]], page: int, chunk: int, overlap: str, pool: int
) -> None:
    sections = {"cache": {"page_size": page, "tokens": pool}, "schedule": {"chunk": chunk}}
    tokens, accepted = run(tiny_model("llama"), GREEDY, SEEDED, grammar=TOY, engine={"overlap": overlap}, **sections)
    assert tokens == plain
    assert accepted > 40


@pytest.mark.parametrize(
    ("other", "params"),
    [
        ("Right", GREEDY),
        ("Right", SEEDED),
        ("Wrong", SEEDED),
        ("Tree", SEEDED),
        ("Ngram", GREEDY),
        ("Raises", GREEDY),
        ("Nonsense", GREEDY),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.temperature}",
)
def test_other_drafters_continue_it(
    tiny_model: Callable[[str], Path],
    plain: list[list[int]],
    alone: dict[float, int],
    other: str,
    params: SamplingParams,
) -> None:
    """Named before or after: the grammar leads, the other goes on behind its chain, and no token changes."""
    expected = plain[: len(PROMPTS)] if params is GREEDY else plain[len(PROMPTS) :]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    more = {"use": f"{TOYS}:{other}", "texts": texts}
    spec = [more, {"use": "grammar"}] if params is GREEDY else [{"use": "grammar"}, more]
    tokens, accepted = run(tiny_model("llama"), params, grammar=TOY, spec=spec)
    assert tokens == expected
    assert accepted > alone[params.temperature] or other != "Right"


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


def test_canonical_forcing_says_so(tiny_model: Callable[[str], Path]) -> None:
    spec = [{"use": "grammar", "forcing": "canonical"}]
    with engine(tiny_model("llama"), grammar=TOY, spec=spec) as running:
        result = running.generate(PROMPTS[0], SamplingParams(max_tokens=60, regex=PATTERN, temperature=0.0))
        stats = running.stats()
        assert stats["accepted_tokens"] == stats["draft_tokens"] > 0
        assert result.outputs[0].notes == ["forced text was accepted without asking the model (forcing: canonical)"]


@pytest.mark.real
def test_the_default_model_writes_the_same_in_fewer_passes() -> None:
    params = SamplingParams(max_tokens=40, json_schema=SCHEMA, temperature=0.0)
    texts = ["An order as JSON:", "größe:", "Yesterday we sold"]
    written, steps = [], []
    for spec in ([], [{"use": "grammar"}]):
        with Engine("smollm2-135m", cache={"tokens": 2048}, spec=spec) as running:
            written.append([result.token_ids for result in running.generate(texts, params)])
            steps.append(running.stats()["steps"])
    assert written[0] == written[1]
    assert steps[1] < 0.7 * steps[0]
