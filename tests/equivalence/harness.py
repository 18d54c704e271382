"""The oracle of the equivalence matrix: transformers' plain forward, step by step, with the margin of every choice."""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phloem import Engine, SamplingParams

# Design §8: a mismatch is excused only where the reference's two best logits differ by less than this.
TIE = 1e-3
TOYS = Path(__file__).with_name("toy_drafters.py")


class Reference:
    """Greedy continuations by a transformers model, every token from a fresh forward pass over the whole text.

    `cached` lets transformers keep its own KV, and leave out logits that nobody reads: for the real models, whose
    prompts are long and whose vocabularies are most of the work.
    """

    def __init__(self, model: Any, *, cached: bool = False) -> None:
        self.model, self.cached = model.eval(), cached
        self._known: defaultdict[tuple[int, ...], tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """`count` tokens after `prompt`, and for each the gap between the two best logits.

        A `guess` of them costs one pass, however long it is: what it has right need not be computed token by token.
        """
        tokens, margins = self._known[tuple(prompt)]
        if guess and not tokens:
            logits = self.model(
                torch.tensor([[*prompt, *guess]]), use_cache=False, logits_to_keep=len(guess) + 1
            ).logits
            for i, row in enumerate(logits[0, :-1]):
                self._choose(row[None], [(tokens, margins)])
                if tokens[-1] != guess[i]:
                    break
        past = None
        while len(tokens) < count:
            feed = [*prompt, *tokens] if past is None else tokens[-1:]
            kept = {"logits_to_keep": 1, "cache": past} if self.cached else {}
            out = self.model(torch.tensor([feed]), use_cache=self.cached, **kept)
            past = out.past_key_values if self.cached else None
            self._choose(out.logits[:, -1], [(tokens, margins)])
        return tokens[:count], margins[:count]

    @torch.inference_mode()
    def learn(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """What `greedy` will be asked for, in batches: texts are padded at their ends, which no earlier token sees."""
        while short := [(p, self._known[tuple(p)]) for p in prompts if len(self._known[tuple(p)][0]) < count]:
            texts = [[*prompt, *tokens] for prompt, (tokens, _) in short]
            longest = max(map(len, texts))
            batch = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
            ends = torch.tensor([len(text) - 1 for text in texts])
            logits = self.model(batch, use_cache=False).logits
            self._choose(logits[torch.arange(len(texts)), ends], [known for _, known in short])

    @staticmethod
    def _choose(logits: torch.Tensor, known: Sequence[tuple[list[int], list[float]]]) -> None:
        best = logits.float().topk(2)
        for (tokens, margins), ids, values in zip(known, best.indices.tolist(), best.values.tolist(), strict=True):
            tokens.append(ids[0])
            margins.append(values[0] - values[1])


def assert_same(got: Sequence[int], expected: Sequence[int], margins: Sequence[float], what: str = "") -> None:
    """Equal tokens, or a first difference at a tie of the reference; after a tie nothing can be said."""
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            assert margins[i] < TIE, f"{what}: token {i} is {mine}, the reference has {theirs} by {margins[i]:.4f}"
            return
    assert len(got) == len(expected), f"{what}: {len(got)} tokens, the reference has {len(expected)}"


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A small set of combinations in which every pair of values of any two axes occurs; the same on every call."""
    rows = list(itertools.product(*axes))
    random.Random(1).shuffle(rows)

    def pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def prompts(
    count: int, *, low: int = 3, high: int = 60, vocab: int = 500, shared: int = 20, seed: int = 5
) -> list[list[int]]:
    """Random prompts; every second one starts with one common prefix of `shared` tokens."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, vocab) for _ in range(shared)]
    made = []
    for i in range(count):
        own = [rng.randrange(4, vocab) for _ in range(rng.randint(low, high))]
        made.append([*prefix, *own] if i % 2 else own)
    return made


def engine(
    path: Path | str, *, drafter: str | None = None, texts: Sequence[Sequence[int]] = (), **sections: Any
) -> Engine:
    """An engine on a tiny model that checks slot conservation after every step."""
    sections.setdefault("grammar", "none")  # else every engine starts a compile process
    sections.setdefault("engine", {})
    # what a step costs on the day must not decide what is tested
    sections["engine"] = {"check": True, "threads": 1, "draft_size": "fixed", **sections["engine"]}
    sections.setdefault("cache", {})
    sections["cache"] = {"tokens": 4096, **sections["cache"]}
    if drafter:
        sections["spec"] = [{"use": f"{TOYS}:{drafter}", "texts": [list(text) for text in texts]}]
    return Engine(str(path), **sections)


def greedy(count: int, **more: Any) -> SamplingParams:
    """Greedy parameters for exactly `count` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


@functools.cache
def tiny_reference(path: Path) -> Reference:
    """The reference of a tiny model folder."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return Reference(model)


def serve(running: Engine, folder: Path, texts: Sequence[list[int]], count: int, **call: Any) -> list[Any]:
    """Greedy outputs of a tiny model, each of so many tokens, the reference's."""
    results = running.generate(list(texts), greedy(count), **call)
    reference = tiny_reference(folder)
    reference.learn(texts, count)
    for result, text in zip(results, texts, strict=True):
        assert_same(result.token_ids, *reference.greedy(text, count), f"a prompt of {len(text)}")
    return list(results)
