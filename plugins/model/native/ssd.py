"""The recurrence of Mamba-2 over ragged tokens: state space duality (Dao and Gu, 2024, arXiv 2405.21060).

Per head, with a decay a_t = exp(dt_t A): state_t = a_t state_(t-1) + dt_t x_t B_t^T and y_t = state_t C_t. Within a
piece of tokens that is attention without a softmax, weighted by the decays between two tokens; from piece to piece the
state is carried. So no step of Python is taken for a token.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from phloem.batch import Batch

PIECE_TOKENS = 64  # the weights between its tokens are [tokens, tokens] for each head


@dataclass(slots=True)
class _Bucket:
    """Segments of one length, computed together."""

    length: int
    segments: torch.Tensor  # [B] int64
    rows: torch.Tensor  # [B * length] int64
    kept: list[tuple[int, int, int]]  # (segment of the bucket, token of the segment, place in what is kept)


class ScanStep:
    """Which segments of a step are scanned together, once for all layers."""

    def __init__(self, batch: Batch) -> None:
        assert batch.states is not None, "a model with recurrent layers was given a batch without states"
        starts, device = batch.starts, batch.tokens.device
        members: dict[int, list[int]] = {}
        places: list[int] = []  # of each segment among those of its length
        for segment, length in enumerate(batch.q_lens):
            alike = members.setdefault(length, [])
            places.append(len(alike))
            alike.append(segment)
        kept: dict[int, list[tuple[int, int, int]]] = {}
        for k, row in enumerate(batch.states.kept):
            segment = bisect_right(starts, row) - 1
            kept.setdefault(batch.q_lens[segment], []).append((places[segment], row - starts[segment], k))
        self._count = len(batch.states.kept)
        self._buckets = [
            _Bucket(
                length,
                torch.tensor(segments, device=device),
                torch.cat([torch.arange(starts[s], starts[s] + length, device=device) for s in segments]),
                kept.get(length, []),
            )
            for length, segments in members.items()
        ]

    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        initial: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H, P], dt [T, H], rate A [H], b and c [T, H, N], initial states [S, H, P, N], all float32.

        Returns y [T, H, P] and the kept states [K, H, P, N].
        """
        y = torch.empty_like(x)
        kept = x.new_empty(self._count, *initial.shape[1:])
        for bucket in self._buckets:
            shape = (len(bucket.segments), bucket.length)
            own = [part[bucket.rows].view(*shape, *part.shape[1:]) for part in (x * dt[..., None], dt * rate, b, c)]
            state = initial[bucket.segments]
            made = []
            for low in range(0, bucket.length, PIECE_TOKENS):
                piece = [part[:, low : low + PIECE_TOKENS] for part in own]
                marks = [(s, t - low, k) for s, t, k in bucket.kept if low <= t < low + PIECE_TOKENS]
                out, state = _scan(piece, state, marks, kept)
                made.append(out)
            y[bucket.rows] = torch.cat(made, 1).flatten(0, 1)
        return y, kept


def _scan(
    piece: list[torch.Tensor], state: torch.Tensor, marks: list[tuple[int, int, int]], kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece: outputs [B, Q, H, P] and the state after it; fills what is kept of it."""
    x, log_decay, b, c = piece
    total = log_decay.cumsum(1)  # [B, Q, H]: of the state before the piece at each token
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later[None, :, :, None], float("-inf")).exp()
    scores = torch.einsum("bthn,bshn->btsh", c, b) * between
    out = torch.einsum("btsh,bshp->bthp", scores, x)
    out += torch.einsum("bthn,bhpn->bthp", c, state) * total.exp()[..., None]
    last = x.shape[1] - 1
    where = [(s, last) for s in range(len(x))] + [(s, t) for s, t, _ in marks if t != last]
    at = torch.tensor(where, device=x.device)
    weights = between[at[:, 0], at[:, 1]]  # [K, Q, H]: of each token in the state after token t
    states = torch.einsum("ksh,kshp,kshn->khpn", weights, x[at[:, 0]], b[at[:, 0]])
    states += state[at[:, 0]] * total[at[:, 0], at[:, 1]].exp()[..., None, None]
    place = {pair: i for i, pair in enumerate(where)}
    for s, t, k in marks:
        kept[k] = states[place[s, t]]
    return out, states[: len(x)]
