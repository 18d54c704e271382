"""What the sparse head saves is not seen in the output: tokens are those of whole rows, with everything else on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import engine, pairwise, prompts
from phloem import SamplingParams, sampler
from phloem.plugins.model.native import NativeModel

GRAMMAR = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
PATTERN = r"(the|a) (quick|slow) (fox|dog)s? [a-z]{3,9}( and so on)?\."
PROMPTS = prompts(2, high=30)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.5, "seed": 5, "top_p": 0.8, "logit_bias": {70: 3.0}},
    {"temperature": 0.8, "seed": 6, "top_k": 5, "repetition_penalty": 1.3, "min_tokens": 6},
]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def run(folder: Path, params: list[SamplingParams], **sections: Any) -> list[list[int]]:
    """All kinds of parameters side by side, a free request among them."""
    with engine(folder, grammar=GRAMMAR, **sections) as running:
        streams = [running.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))]
        streams += [running.stream(prompt, own) for own in params for prompt in PROMPTS]
        written = [[token for delta in stream for token in delta.token_ids] for stream in streams]
        running.check()
    return written


def test_tokens_are_those_of_whole_rows(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, over drafts, pages, chunks and overlap."""
    params = [SamplingParams(max_tokens=40, regex=PATTERN, **kind) for kind in KINDS]
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "FEW_TOKENS", 0)
        whole = run(llama, params)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS * len(KINDS), whole[1:], strict=True)]
    for drafter, page, chunk, overlap in pairwise([None, "Right", "Wrong", "Tree"], [1, 4], [3, 64], ["off", "on"]):
        sections = {"cache": {"page_size": page}, "schedule": {"chunk": chunk}, "engine": {"overlap": overlap}}
        assert run(llama, params, drafter=drafter, texts=texts, **sections) == whole, (drafter, sections)


def test_a_model_without_the_capability_writes_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few tokens are then rows of the one product."""
    params = [SamplingParams(max_tokens=40, regex=PATTERN, **kind) for kind in KINDS]
    expected = run(llama, params)
    monkeypatch.setattr(NativeModel, "capabilities", NativeModel.capabilities - {"sparse_head"})
    monkeypatch.setattr(NativeModel, "logits_at", None)
    assert run(llama, params) == expected


@pytest.mark.parametrize("logprobs", [None, 1])
def test_rows_of_few_tokens_are_never_rows_of_the_product(
    llama: Path, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """Counted: a regex that allows little asks for no whole row, unless logprobs are wanted."""
    rows: list[int] = []
    columns: list[int] = []
    logits, logits_at = NativeModel.logits, NativeModel.logits_at

    def counted(self: NativeModel, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    def counted_at(self: NativeModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        columns.append(len(tokens))
        return logits_at(self, hidden, tokens)

    with engine(llama, grammar=GRAMMAR, spec=[]) as running:
        monkeypatch.setattr(NativeModel, "logits", counted)
        monkeypatch.setattr(NativeModel, "logits_at", counted_at)
        params = SamplingParams(
            temperature=0.0, max_tokens=60, regex="(yes|no), and (all|none) of it", logprobs=logprobs
        )
        result = running.generate(PROMPTS[0], params)
    assert result.finish_reason == "stop"
    assert sum(rows) == (0 if logprobs is None else len(result.token_ids))
    assert bool(columns) == (logprobs is None)
    assert all(1 < count <= sampler.FEW_TOKENS for count in columns)
    assert len(columns) < len(result.token_ids)  # certain tokens ask for nothing at all
