"""Jump-forward at temperature 1 over the default model's vocabulary: tokens and their distribution stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from phloem.batch import Segment
from phloem.constraint import Constraint
from phloem.drafting import Drafting
from phloem.interfaces import Grammar, Matcher, PluginContext, TokenizerData
from phloem.masks import MaskFiller
from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.registry import build
from phloem.request import Request
from phloem.sampler import Sampler
from phloem.testing.plugin import TOY_SPEC
from phloem.tokenizer import Tokenizer

LONG = r'\{"order(Id|Name)": (true|false), "größe": "(世|é)"\}'
SHORT = r'\{"order(Id|Name)": (1|é)\}'
torch.set_num_threads(1)


class Model:
    """Logits after a text: a stretch, chosen by its last two tokens, of one long random row; longer tokens are liked.

    Only as much that texts fall into tokens in several ways.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        lengths = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        self.liking = 1.5 * torch.tensor(lengths, dtype=torch.float32).clamp_max(8)
        self.noise = torch.randn(2 * len(lengths), generator=torch.Generator().manual_seed(1))

    def __call__(self, text: list[int]) -> torch.Tensor:
        at = (text[-1] * 7919 + text[-2] * 104729) % len(self.liking)
        return self.noise[at : at + len(self.liking)] + self.liking


class Rig:
    """Requests under one grammar, decoded in steps as the loop does it, without a model's cost."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(TokenizerData((folder / "tokenizer.json").read_text()))
        end = self.tokenizer.encode("<|im_end|>")
        self.spec = replace(TOY_SPEC, vocab_size=self.tokenizer.vocab_size, eos_token_ids=tuple(end))
        self.model = Model(self.tokenizer)
        context = PluginContext("grammar", "xgrammar", model=self.spec, tokenizer=self.tokenizer)
        grammar: Grammar = build("grammar", "xgrammar", context)
        constraints = [Constraint(kind="regex", value=regex) for regex in (LONG, SHORT)]
        self.starts: dict[str, Matcher] = {c.value: grammar.matcher(c, grammar.compile(c)) for c in constraints}

    def run(self, regex: str, seeds: range, *, drafts: bool) -> tuple[list[tuple[int, ...]], int]:
        """Outputs of all seeds, one request after the other, so that each sees the memories of those before."""
        context = PluginContext("spec", "grammar", model=self.spec, tokenizer=self.tokenizer)
        drafters = [("grammar", build("spec", "grammar", context))] if drafts else []
        drafting = Drafting(drafters, self.spec.vocab_size)
        sampler, filler = Sampler(self.spec.vocab_size, {}), MaskFiller(self.spec.vocab_size, torch.device("cpu"))
        outputs, steps = [], 0
        for seed in seeds:
            call = GenerateCall(call_id=f"{seed}", prompt=[1, 2], params=SamplingParams())
            request = Request(call, 0, seed=seed, limit=200, arrival=seed, matcher=self.starts[regex].fork())
            assert request.matcher is not None
            while not request.matcher.is_complete():
                steps += 1
                for token in self.step(request, drafting, sampler, filler):
                    assert request.matcher.accept(token)
                    request.tokens.append(token)
                    if request.matcher.is_complete():
                        break
            drafting.forget(request)
            outputs.append(tuple(request.output))
        assert not drafting.failures
        return outputs, steps

    def step(self, request: Request, drafting: Drafting, sampler: Sampler, filler: MaskFiller) -> list[int]:
        """What one step emits."""
        draft = drafting.propose(request, 16)
        segment = Segment(request, len(request.tokens) - 1, 1, True, draft)
        text = request.tokens.tolist()
        paths = [[draft.tokens[i] for i in draft.path(node)] if draft else [] for node in range(-1, len(draft or ()))]
        rows = {i: self.model(text + path) for i, path in enumerate(paths)}

        def head(full: list[int], few: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            whole = torch.stack([rows[row] for row in full]) if full else torch.empty(0, self.spec.vocab_size)
            return whole, [rows[row][tokens] for row, tokens in few]

        (outcome,) = sampler.start(head, [segment], filler.fill([segment])).outcomes()
        assert outcome.error is None
        return outcome.tokens


@pytest.fixture(scope="module")
def rig(hf_folder: Callable[[str], Path]) -> Rig:
    return Rig(hf_folder("smollm2-135m"))


@pytest.mark.real
def test_seeded_tokens_are_those_of_masked_decoding(rig: Rig) -> None:
    plain, steps = rig.run(LONG, range(30), drafts=False)
    drafted, fewer = rig.run(LONG, range(30), drafts=True)
    assert drafted == plain
    assert len(set(plain)) > 10
    assert fewer < 0.7 * steps


@pytest.mark.real
def test_the_distribution_is_that_of_masked_decoding(rig: Rig) -> None:
    """Chi-square of two samples of whole outputs, with other seeds: how they fall into tokens counts too."""
    plain, drafted = (
        Counter(rig.run(SHORT, range(500), drafts=False)[0]),
        Counter(rig.run(SHORT, range(500, 1000), drafts=True)[0]),
    )
    common = [output for output, count in (plain + drafted).most_common() if count >= 16]
    table = [[sample[output] for output in common] for sample in (plain, drafted)]
    for row, sample in zip(table, (plain, drafted), strict=True):
        row.append(sample.total() - sum(row))
    assert len(common) > 8
    assert stats.chi2_contingency(table).pvalue > 1e-3
