"""How a ragged step becomes a few dense attention problems: sharing, bucketing, slots and masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from phloem.batch import Batch

from ._piece import Piece
from ._sharing import Shared, find_shared, shareable

BATCHED_QUERIES = 32  # segments with more queries than this fill a matrix product on their own
PIECE_TOKENS = 2048  # context entries of one piece: few enough to be still in the CPU's cache when they are read
SHARED_ROWS, SHARED_TOKENS = 512, 2048  # of one shared piece: bounds its score matrix


class Span(NamedTuple):
    """What a segment's queries [row, row + queries) see of entries [low, high) of table row `segment`.

    Context entry i holds position i, but for the last entries of a segment with drafts, which are draft nodes.
    """

    segment: int
    row: int
    queries: int
    low: int
    high: int
    partial: bool  # entries before `low` are seen as well, in shared pieces

    @property
    def length(self) -> int:
        """Context entries to read."""
        return self.high - self.low


class Pieces:
    """The segments of a step, and how to cut them into pieces for a given window."""

    def __init__(self, batch: Batch) -> None:
        self._trees = batch.tree_masks
        self._q_lens = batch.q_lens
        self._kv_lens = batch.kv_lens
        self._starts = batch.starts

    def build(self, table: torch.Tensor, window: int | None) -> list[Piece]:
        """Pieces over all segments. `table` [S, max_kv] int32 maps context entries to slots."""
        pasts = [kv - q for kv, q in zip(self._kv_lens, self._q_lens, strict=True)]
        pieces: list[Piece] = []
        if window is not None:  # nobody looks further back than a segment's first query does
            lows = [max(0, past - window + 1) for past in pasts]
        elif table.device.type == "cpu":  # elsewhere the look at the table would wait for the device
            shared, lows = find_shared(table.numpy(), shareable(pasts, self._q_lens))
            for range_ in shared:
                pieces.extend(self._shared_pieces(range_, table))
        else:
            lows = [0] * len(pasts)
        spans = [
            Span(i, self._starts[i], self._q_lens[i], low, self._kv_lens[i], partial=window is None and low > 0)
            for i, low in enumerate(lows)
        ]
        pieces.extend(self._piece(bucket, table, window) for bucket in _bucket(spans))
        return pieces

    def _shared_pieces(self, shared: Shared, table: torch.Tensor) -> list[Piece]:
        """All queries of the members over the entries they share, without a mask."""
        rows = torch.cat([torch.arange(self._starts[m], self._starts[m + 1]) for m in shared.members])
        pieces: list[Piece] = []
        for low in range(shared.low, shared.high, SHARED_TOKENS):
            slots = table[shared.members[0], low : min(low + SHARED_TOKENS, shared.high)].long()
            pieces.extend(
                Piece(1, len(r), len(slots), r, slots, None, partial=True) for r in torch.split(rows, SHARED_ROWS)
            )
        return pieces

    def _piece(self, spans: list[Span], table: torch.Tensor, window: int | None) -> Piece:
        device = table.device
        queries, longest = spans[0].queries, max(span.length for span in spans)
        segments, rows, lows = torch.tensor([(s.segment, s.row, s.low) for s in spans], device=device).unbind(1)
        entries = (lows[:, None] + torch.arange(longest, device=device)).clamp_(max=table.shape[1] - 1)
        slots = table[segments[:, None], entries].long()
        trivial = queries == 1 and all(span.length == longest for span in spans)
        mask = None if trivial else self._mask(spans, longest, window, device)
        rows = (rows[:, None] + torch.arange(queries, device=device)).reshape(-1)
        return Piece(len(spans), queries, longest, rows, slots.reshape(-1), mask, spans[0].partial)

    def _mask(self, spans: list[Span], longest: int, window: int | None, device: torch.device) -> torch.Tensor:
        """[B, Q, L] bool, True where a query sees an entry."""
        bounds = torch.tensor([(s.low, s.high) for s in spans], device=device)
        queries = spans[0].queries
        key = (bounds[:, :1] + torch.arange(longest, device=device))[:, None, :]
        query = (bounds[:, 1:] - queries + torch.arange(queries, device=device))[:, :, None]
        seen = key <= query
        if window is not None:
            seen &= query - key < window
        for i, span in enumerate(spans):
            tree = self._trees.get(span.segment)
            if tree is not None:
                rows = _tree_rows(tree, span, longest, window)
                seen[i, queries - len(tree) :] = torch.from_numpy(rows).to(device)
        return seen


def _tree_rows(tree: npt.NDArray[np.bool_], span: Span, longest: int, window: int | None) -> npt.NDArray[np.bool_]:
    """[m, L] bool: what the m draft nodes of a segment see; `tree` [m, m] are their ancestors."""
    committed = span.high - len(tree)
    position = np.arange(span.low, span.low + longest)
    node_position = committed - 1 + tree.sum(1)
    rows = np.broadcast_to(position < committed, (len(tree), longest)).copy()
    nodes = slice(committed - span.low, span.length)
    rows[:, nodes] = tree
    if window is not None:
        position[nodes] = node_position
        rows &= node_position[:, None] - position < window
    return rows


def _bucket(spans: list[Span]) -> list[list[Span]]:
    """Spans with equal query counts together, within a factor of two in length and a bounded padded size."""
    buckets: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.queries, s.partial, -s.length)):
        first = buckets[-1][0] if buckets else None
        joins = (
            first is not None
            and (span.queries, span.partial) == (first.queries, first.partial)
            and span.queries <= BATCHED_QUERIES
            and 2 * span.length >= first.length
            and (len(buckets[-1]) + 1) * first.length <= PIECE_TOKENS
        )
        if joins:
            buckets[-1].append(span)
        else:
            buckets.append([span])
    return buckets
