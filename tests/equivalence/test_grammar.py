"""A grammar's masks meet drafts, batches, chunks, retraction and overlap: the output is that of masked decoding."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import engine, pairwise, prompts
from phloem import SamplingParams
from phloem.errors import RequestError, StepError

FAULTY = Path(__file__).with_name("faulty_plugins.py")
GRAMMAR = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"(the|a) (quick|slow) (fox|dog)s?( and so on)?\."
PROMPTS = prompts(4, high=30)


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def run(folder: Path, temperature: float, **sections: Any) -> list[tuple[str, list[int]]]:
    """Constrained and free requests in one batch; every constrained text matches."""
    constrained = SamplingParams(temperature=temperature, seed=9, max_tokens=40, regex=PATTERN)
    with engine(folder, grammar=GRAMMAR, **sections) as running:
        free = running.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        next(free)
        results = running.generate(PROMPTS, constrained)
        list(free)
        running.check()
    for result in results:
        assert re.fullmatch(PATTERN, result.text), result.text
        assert result.finish_reason == "stop"
    return [(result.text, result.token_ids) for result in results]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_output_is_the_same_with_everything_on(llama: Path, temperature: float) -> None:
    """what-breaks 38: a grammar and drafts get stuck or crash together."""
    plain = run(llama, temperature)
    texts = [[*prompt, *tokens] for prompt, (_, tokens) in zip(PROMPTS, plain, strict=True)]
    axes = (["Right", "Wrong", "Tree"], [1, 4], [1, 16], ["off", "on"], [4096, 128])
    rows = pairwise(*axes)
    for drafter, page, chunk, overlap, pool in rows[::2] if temperature else rows[1::2]:
        sections = {
            "cache": {"page_size": page, "tokens": pool},
            "schedule": {"chunk": chunk},
            "engine": {"overlap": overlap},
        }
        assert run(llama, temperature, drafter=drafter, texts=texts, **sections) == plain, sections


def test_choices_and_streams(llama: Path) -> None:
    with engine(llama, grammar=GRAMMAR) as running:
        params = SamplingParams(temperature=1.0, n=3, max_tokens=30, choices=["yes", "no", "yes, but later"])
        result = running.generate(PROMPTS[0], params)
        assert {output.text for output in result.outputs} <= {"yes", "no", "yes, but later"}
        text = "".join(delta.text for delta in running.stream(PROMPTS[1], SamplingParams(regex=PATTERN, max_tokens=40)))
        assert re.fullmatch(PATTERN, text)


def test_cut_by_length_says_so(llama: Path) -> None:
    with engine(llama, grammar=GRAMMAR) as running:
        assert running.generate(PROMPTS[0], SamplingParams(regex="[ab]{40}", max_tokens=3)).finish_reason == "length"


def test_a_grammar_without_a_way_on_ends_its_request_only(llama: Path) -> None:
    with engine(llama, grammar=GRAMMAR) as running:
        with pytest.raises(RequestError, match="the grammar allows no token of this vocabulary"):
            running.generate(PROMPTS[0], SamplingParams(regex="\u2603", max_tokens=30))  # no single token has a snowman
        assert running.generate(PROMPTS[1], SamplingParams(regex=PATTERN, max_tokens=40)).finish_reason == "stop"
        running.check()


@pytest.mark.parametrize(
    ("regex", "words"), [("[a-z]+", "forbids token .*, which its mask allowed"), ("x[a-z]+", "LookupError.*lost its")]
)
def test_a_matcher_that_breaks_while_it_follows_the_output_fails_its_request_only(
    llama: Path, regex: str, words: str
) -> None:
    with engine(llama, grammar={"use": f"{FAULTY}:Fickle"}) as running:
        bystander = running.stream(PROMPTS[1], SamplingParams(regex="[a-z]{9}", max_tokens=40))
        text = next(bystander).text
        with pytest.raises(StepError, match=words):
            running.generate(PROMPTS[0], SamplingParams(regex=regex, max_tokens=30))
        assert re.fullmatch("[a-z]{9}", text + "".join(delta.text for delta in bystander))
        running.check()


def test_a_mask_wins_over_min_tokens(llama: Path) -> None:
    with engine(llama, grammar=GRAMMAR) as running:
        result = running.generate(PROMPTS[0], SamplingParams(regex="yes", min_tokens=20, max_tokens=30))
        assert (result.text, result.finish_reason) == ("yes", "stop")
