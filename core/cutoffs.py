"""The second half of the filter pipeline: which tokens a sampled request draws from.

Cut-offs work on tokens ordered by score, equal scores by token id: `top_k` keeps the first k, `top_p` the shortest
beginning that holds at least that mass (renormalised after top_k, at least one token), `min_p` those at least that
likely relative to the best. So ties at a cut go to lower token ids, on every device.

On the host only the best few hundred tokens are looked at, more where these do not hold the cut, so that rows are
hardly ever sorted; elsewhere one stable sort avoids waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .params import SamplingParams

_FIRST_CANDIDATES = 256
_GROWTH = 8  # factor by which the candidates grow while they do not hold a row's cut


class Kept(NamedTuple):
    """What cut-offs leave of some rows: scores [R, K], best first, minus infinity where cut, and their token ids."""

    rows: torch.Tensor  # [R] int64, rows of the scores given to `cut`
    scores: torch.Tensor
    ids: torch.Tensor


class _Limits(NamedTuple):
    """Per row what cuts it, [R, 1] each; infinite where nothing does."""

    k: torch.Tensor  # tokens to keep, float64
    p: torch.Tensor  # mass to hold
    floor: torch.Tensor  # lowest score, relative to the best
    whole: torch.Tensor  # mass of all tokens, in units of the best one's; 1 where no row needs it


def needs_cut(params: SamplingParams, vocab_size: int) -> bool:
    """True when a sampled request draws from a part of the vocabulary only."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def cut(scores: torch.Tensor, params: Sequence[SamplingParams]) -> list[Kept]:
    """Apply top_k, top_p and min_p to scores [R, vocab] (temperature applied), one SamplingParams per row.

    The rows come back in any order. Rows with NaN or infinity keep it, for whoever draws to find.
    """
    limits = _limits(params, scores)
    rows = torch.arange(len(params), device=scores.device)
    if scores.device.type != "cpu":
        ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return [Kept(rows, _prefix(ordered, limits)[0], ids)]
    k = max(p.top_k if p.top_k > 0 else _FIRST_CANDIDATES for p in params)
    done: list[Kept] = []
    while True:
        ordered, ids, lowest = select(scores, k)
        kept, held = _prefix(ordered, limits)
        # a cut is sure if it lies among the candidates, which are all tokens at or above `lowest`
        sure = (held | (lowest < ordered[:, :1] + limits.floor) | (lowest == -math.inf) | (limits.k <= k))[:, 0]
        if k >= scores.shape[1] or bool(sure.all()):
            return [*done, Kept(rows, kept, ids)]
        if bool(sure.any()):
            done.append(Kept(rows[sure], kept[sure], ids[sure]))
        scores, rows, limits = scores[~sure], rows[~sure], _Limits(*(limit[~sure] for limit in limits))
        k *= _GROWTH


def select(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best tokens of each row of scores [R, vocab] on the host and all their equals, in the order of cut-offs.

    Returns scores and ids [R, K], padded with minus infinity, and the lowest score [R, 1]. Selection instead of
    sorting: a partition finds the k-th score, a comparison everything not below it.
    """
    table = scores.detach().numpy()
    rows, vocab = table.shape
    last = max(0, vocab - k)
    lowest = np.partition(table, last, axis=-1)[:, last, None]
    chosen = ~(table < lowest)  # NaN stays
    if (lowest == -math.inf).any():
        chosen &= table != -math.inf
    row, token = np.divmod(np.flatnonzero(chosen), vocab)
    counts = np.bincount(row, minlength=rows)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = np.full((rows, max(1, int(counts.max(initial=0)))), -math.inf, dtype=table.dtype)
    ids = np.zeros(values.shape, dtype=np.int64)
    values[row, column], ids[row, column] = table[row, token], token
    ordered, order = torch.sort(torch.from_numpy(values), dim=-1, descending=True, stable=True)
    return ordered, torch.from_numpy(ids).gather(-1, order), torch.from_numpy(lowest)


def _limits(params: Sequence[SamplingParams], scores: torch.Tensor) -> _Limits:
    tops = [p.top_k if p.top_k > 0 else math.inf for p in params]
    masses = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
    floors = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    k, p = torch.tensor([tops, masses], dtype=torch.float64, device=scores.device)[:, :, None]
    whole = torch.ones_like(p)
    if any(p.top_p < 1.0 and p.top_k <= 0 for p in params):
        whole = (scores - scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True).double()
    return _Limits(k, p, torch.tensor(floors, dtype=scores.dtype, device=scores.device)[:, None], whole)


def _prefix(ordered: torch.Tensor, limits: _Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut ordered candidates [R, K]: the same with the cut ones at minus infinity, and [R, 1] whether p was held."""
    width = ordered.shape[1]
    mass = (ordered - ordered[:, :1]).exp_().double().cumsum(-1)  # in units of the best token's
    before = mass.roll(1, -1)
    before[:, 0] = 0.0
    within = mass.gather(-1, limits.k.clamp(max=width).long() - 1)
    bound = limits.p * torch.where(limits.k.isinf(), limits.whole, within)
    place = torch.arange(width, device=ordered.device)
    gone = (place >= limits.k) | (before >= bound) | (ordered < ordered[:, :1] + limits.floor)
    return ordered.masked_fill(gone, -math.inf), mass[:, -1:] >= bound
