"""Texts of about the same length side by side, padded at their ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .corpus import Sample

_WINDOW = 64  # batches' worth of texts that are sorted by length together
_MOST = 384  # tokens of a text: the beginnings of long prompts are left out, as attention costs their square


def cropped(sample: Sample) -> Sample:
    """The end of a text, its answer at least."""
    out = max(0, min(len(sample.tokens) - _MOST, sample.prompt_len - 1))
    tensors = (each[out:] for each in (sample.tokens, sample.states, sample.best, sample.chances))
    return Sample(sample.talk, sample.prompt_len - out, sample.greedy, *tensors)


class Batch(NamedTuple):
    """B texts of up to L tokens, of which up to R rows each are unrolled: the prompt's last token and the answer's."""

    features: Tensor  # [B, L, layers * hidden] float16
    tokens: Tensor  # [B, L] int64
    best: Tensor  # [B, L, K] int64: draft tokens that may follow, likeliest first; -1 where the head has none
    chances: Tensor  # [B, L, K] float32: their probabilities
    lengths: Tensor  # [B] int64
    at: Tensor  # [B, R] int64: where the rows stand in their texts; beyond its end, where a text has fewer

    def step(self, k: int) -> tuple[Tensor, Tensor]:
        """(tokens, valid), both [B, R]: what rows read at step k, and whether the target's choice after it is known."""
        reads = self.at + 1 + k
        valid = reads < self.lengths[:, None]
        return self.tokens.gather(1, reads.where(valid, 0)), valid

    def targets(self, k: int, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What follows that token, for the `valid` rows: draft tokens and probabilities, both [N, K]."""
        text, row = valid.nonzero(as_tuple=True)
        reads = self.at[text, row] + 1 + k
        return self.best[text, reads], self.chances[text, reads]

    def rows(self, x: Tensor) -> Tensor:
        """x [B, L, ...] at the rows: [B, R, ...]."""
        last = self.lengths[:, None] - 1
        return x[torch.arange(len(x), device=x.device)[:, None], torch.minimum(self.at, last)]


def collate(samples: Sequence[Sample], layers: int, index: Tensor, device: torch.device) -> Batch:
    """`layers` first ones of those recorded are features; `index` is `DraftVocabulary.index()`."""

    def padded(tensors: Sequence[Tensor], value: float = 0) -> Tensor:
        return pad_sequence(list(tensors), batch_first=True, padding_value=value).to(device)

    lengths = torch.tensor([len(one.tokens) for one in samples])
    first = torch.tensor([one.prompt_len - 1 for one in samples])
    at = first[:, None] + torch.arange(int((lengths - first).max()) - 1)
    best = padded([index[one.best.long()] for one in samples])
    chances = padded([one.chances for one in samples], -torch.inf).float().exp()
    return Batch(
        features=padded([one.states[:, :layers].flatten(1) for one in samples]),
        tokens=padded([one.tokens.long() for one in samples]),
        best=best,
        chances=chances * (best >= 0),
        lengths=lengths.to(device),
        at=at.to(device),
    )


def order(samples: Sequence[Sample], most: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the texts of each batch, at most `most` tokens with padding; the same for the same seed and epoch."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    shuffled = torch.randperm(len(samples), generator=generator).tolist()
    longest = max(len(one.tokens) for one in samples)
    window = max(1, most // longest) * _WINDOW
    batches: list[list[int]] = []
    for at in range(0, len(shuffled), window):
        batches += _cut(sorted(shuffled[at : at + window], key=lambda i: len(samples[i].tokens)), samples, most)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _cut(indices: Sequence[int], samples: Sequence[Sample], most: int) -> Iterator[list[int]]:
    """Ascending lengths: the last of a batch decides its padding."""
    batch: list[int] = []
    for i in indices:
        if batch and len(samples[i].tokens) * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def held_out(sample: Sample) -> bool:
    """One conversation in twenty is not trained on."""
    return sample.talk % 20 == 7
