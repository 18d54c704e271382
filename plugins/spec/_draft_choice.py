"""What the draft model would write: its probabilities under a request's own filters, as far as these are cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from phloem import cutoffs, filters
from phloem.interfaces import DraftContext


def probabilities(contexts: Sequence[DraftContext], logits: torch.Tensor) -> torch.Tensor:
    """[R, vocab] float32 from logits [R, vocab]: grammar, bias and temperature, and cut-offs where it is to be drawn.

    So that they come near the target's own: the nearer, the more is accepted. Penalties are left to the target. A row
    where nothing is possible is 0.
    """
    return softened(contexts, filters.masked(logits, range(len(contexts)), _masks(contexts, logits.shape[1])))


def softened(
    contexts: Sequence[DraftContext], scores: torch.Tensor, places: Mapping[int, int] | None = None
) -> torch.Tensor:
    """The same from masked scores [R, V], which may be changed; `places` are the columns of tokens, if not their ids.

    The temperature of greedy requests is taken as 1: it changes no order, and tells how sure the model is.
    """
    for row, context in zip(scores, contexts, strict=True):
        for token, bias in (context.params.logit_bias or {}).items():
            if (place := token if places is None else places.get(token)) is not None:
                row[place] += bias
    heat = [1.0 if each.params.greedy else each.params.temperature for each in contexts]
    if any(each != 1.0 for each in heat):
        scores = scores / torch.tensor(heat, device=scores.device)[:, None]
    vocab = scores.shape[1]
    cut = [i for i, c in enumerate(contexts) if c.draws is not None and cutoffs.needs_cut(c.params, vocab)]
    if cut:
        for kept in cutoffs.cut(scores[cut], [contexts[i].params for i in cut]):
            rows = torch.tensor(cut, device=scores.device)[kept.rows]
            whole = torch.full((len(rows), vocab), -torch.inf, device=scores.device)
            scores[rows] = whole.scatter_reduce_(1, kept.ids, kept.scores, "amax")  # padding is at minus infinity
    return scores.float().softmax(-1).nan_to_num_(0.0)


def _masks(contexts: Sequence[DraftContext], vocab: int) -> torch.Tensor | None:
    """[R, ceil(vocab / 32)] bits as grammars fill them; None where there is no grammar."""
    if all(context.matcher is None for context in contexts):
        return None
    bits = np.full((len(contexts), (vocab + 31) // 32), -1, dtype=np.int32)
    for row, context in zip(bits, contexts, strict=True):
        if context.matcher is not None:
            context.matcher.fill(row)
    return torch.from_numpy(bits)
