"""The reduced vocabulary of a head: the tokens that answers are mostly made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .corpus import Sample


@dataclass(frozen=True)
class DraftVocabulary:
    """Draft token i is the target's `ids[i]`, ascending."""

    ids: torch.Tensor  # [draft vocab] int64
    target_size: int

    @property
    def d2t(self) -> torch.Tensor:
        """[draft vocab] int64: what to add to a draft token to have the target's."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> torch.Tensor:
        """[vocab] bool: which of the target's tokens are in it."""
        return torch.zeros(self.target_size, dtype=torch.bool).index_fill_(0, self.ids, True)

    def index(self) -> torch.Tensor:
        """[vocab] int64: the draft token of each of the target's, -1 where there is none."""
        table = torch.full((self.target_size,), -1)
        table[self.ids] = torch.arange(len(self.ids))
        return table


def most_frequent(samples: Iterable[Sample], size: int, target_size: int) -> tuple[DraftVocabulary, float]:
    """The `size` most frequent tokens of the answers, the lower id first among equals; and their share of all."""
    counts = torch.zeros(target_size, dtype=torch.int64)
    for one in samples:
        counts += torch.bincount(one.tokens[one.prompt_len :].long(), minlength=target_size)
    chosen = counts.argsort(descending=True, stable=True)[: min(size, target_size)]
    share = counts[chosen].sum().item() / max(1, counts.sum().item())
    return DraftVocabulary(chosen.sort().values, target_size), share
