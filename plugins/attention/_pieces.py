"""How a ragged step becomes a few dense attention problems: bucketing, slot blocks, masks, and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from phloem.batch import Batch

BATCHED_QUERIES = 32  # segments with more queries than this fill a matrix product on their own
PIECE_TOKENS = 8192  # context rows of one piece: few enough to be still in the CPU's cache when they are read


class Span(NamedTuple):
    """What one segment sees: queries [row, row + queries), context entries [low, high) of table row `segment`.

    Context entry i holds position i, but for the last `drafts` entries, which are draft nodes.
    """

    segment: int
    row: int
    queries: int
    low: int
    high: int

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
        return [self._piece(spans, table, window) for spans in _bucket(self._spans(window))]

    def _spans(self, window: int | None) -> list[Span]:
        spans = []
        for segment, (queries, high) in enumerate(zip(self._q_lens, self._kv_lens, strict=True)):
            first = high - queries  # position of the segment's first query: nobody looks further back than it does
            low = 0 if window is None else max(0, first - window + 1)
            spans.append(Span(segment, self._starts[segment], queries, low, high))
        return spans

    def _piece(self, spans: list[Span], table: torch.Tensor, window: int | None) -> Piece:
        device = table.device
        queries, longest = spans[0].queries, max(span.length for span in spans)
        segments, rows, lows = torch.tensor([(s.segment, s.row, s.low) for s in spans], device=device).unbind(1)
        entries = (lows[:, None] + torch.arange(longest, device=device)).clamp_(max=table.shape[1] - 1)
        slots = table[segments[:, None], entries].long()
        trivial = queries == 1 and all(span.length == longest for span in spans)
        mask = None if trivial else self._mask(spans, longest, window, device)
        rows = (rows[:, None] + torch.arange(queries, device=device)).reshape(-1)
        return Piece(len(spans), queries, longest, rows, slots.reshape(-1), mask)

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


def _tree_rows(tree: np.ndarray, span: Span, longest: int, window: int | None) -> np.ndarray:
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
    for span in sorted(spans, key=lambda s: (s.queries, -s.length)):
        last = buckets[-1] if buckets else [span]
        joins = (
            buckets
            and span.queries == last[0].queries <= BATCHED_QUERIES
            and 2 * span.length >= last[0].length
            and (len(last) + 1) * last[0].length <= PIECE_TOKENS
        )
        if joins:
            last.append(span)
        else:
            buckets.append([span])
    return buckets


@dataclass(slots=True)
class Piece:
    """B segments with Q queries each, over padded contexts of L entries."""

    segments: int
    queries: int
    length: int
    rows: torch.Tensor  # [B * Q] int64: rows of q and of the output
    slots: torch.Tensor  # [B * L] int64
    mask: torch.Tensor | None  # [B, Q, L] bool, None: everything is seen
    _bias: dict[tuple[int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Attend with this piece's rows of q [T, Hq, Dk] over keys, values [slots, Hkv, D] into out [T, Hq, Dv]."""
        B, Q, L = self.segments, self.queries, self.length
        kv_heads, share = keys.shape[1], q.shape[1] // keys.shape[1]
        k = keys.index_select(0, self.slots).to(q.dtype).view(B, L, kv_heads, -1)
        v = values.index_select(0, self.slots).to(q.dtype).view(B, L, kv_heads, -1)
        grouped = q.index_select(0, self.rows).view(B, Q, kv_heads, share, -1)
        if B == 1:  # [Hkv, share, Q, D] queries over [Hkv, 1 -> share, L, D]: stride 0 instead of a repeat
            query = grouped[0].permute(1, 2, 0, 3)
            key, value = (x[0].transpose(0, 1)[:, None].expand(-1, share, -1, -1) for x in (k, v))
            result = _attend(query, key, value, self._mask_for(1, q.dtype), scale, softcap)
            result = result.permute(2, 0, 1, 3)
        else:  # [B, Hkv, Q * share, D] queries over [B, Hkv, L, D]
            query = grouped.transpose(1, 2).reshape(B, kv_heads, Q * share, -1)
            mask = self._mask_for(share, q.dtype)
            result = _attend(query, k.transpose(1, 2), v.transpose(1, 2), mask, scale, softcap)
            result = result.view(B, kv_heads, Q, share, -1).transpose(1, 2)
        out.index_copy_(0, self.rows, result.reshape(B * Q, q.shape[1], -1))

    def _mask_for(self, share: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask, [B, 1, Q * share or 1, L], made once for all layers with this head ratio."""
        if self.mask is None:
            return None
        bias = self._bias.get((share, dtype))
        if bias is None:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias.masked_fill_(~self.mask, float("-inf"))
            if self.queries > 1:
                bias = bias.repeat_interleave(share, dim=1)
            bias = bias[:, None]
            self._bias[share, dtype] = bias
        return bias


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention over dense blocks [*, heads, rows, D]; with a soft-cap in plain steps, as torch has no fused form."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)) * (scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
