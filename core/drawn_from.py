"""What a step's tokens were drawn from: scores of rows after all filters, where rejection sampling or logprobs ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .cutoffs import Kept


@dataclass(slots=True)
class DrawnFrom:
    """The working copy of the scores of rows that need filters or noise: edited greedy, free, then cut rows."""

    scores: torch.Tensor  # [R, vocab] float32
    cut_from: int  # first row that draws from a part of the vocabulary
    kept: list[Kept] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)  # of the first parts of `kept`: by row, where it is

    def dense(self, rows: list[int]) -> torch.Tensor:
        """Scores [rows, vocab] with everything cut at minus infinity."""
        out = self.scores[rows]
        for part, places, within in self._cut_among(rows):
            # padding has the id of some token: the highest score of an id counts
            bare = torch.full_like(out[places], -math.inf)
            out[places] = bare.scatter_reduce_(-1, part.ids[within], part.scores[within], "amax")
        return out

    def chances(self, rows: list[int], tokens: list[int]) -> list[float]:
        """How likely each of these rows is to draw the token beside it. Waits for the device, once."""
        if not rows:
            return []
        wanted = torch.tensor(tokens, device=self.scores.device)
        out = torch.zeros(len(rows), dtype=torch.float64, device=self.scores.device)
        if whole := [i for i, row in enumerate(rows) if row < self.cut_from]:
            distinct = sorted({rows[i] for i in whole})
            own = torch.tensor([distinct.index(rows[i]) for i in whole], device=out.device)
            held = self.scores[distinct]
            out[whole] = (held[own, wanted[whole]] - held.logsumexp(-1)[own]).double().exp()
        for part, places, within in self._cut_among(rows):
            kept = part.scores[within]
            score = kept.masked_fill(part.ids[within] != wanted[places][:, None], -math.inf).amax(-1)
            out[places] = (score - kept.logsumexp(-1)).double().exp()
        return out.tolist()

    def _cut_among(self, rows: list[int]) -> Iterator[tuple[Kept, list[int], list[int]]]:
        """Of each part that was cut: where its rows stand among these, and which of the part's they are."""
        for number, part in enumerate(self.kept):
            if number == len(self.places):  # asked for once a step, as it waits for the device
                self.places.append({row + self.cut_from: at for at, row in enumerate(part.rows.tolist())})
            where = self.places[number]
            if found := [i for i, row in enumerate(rows) if row in where]:
                yield part, found, [where[rows[i]] for i in found]
