"""From a plan to the ragged tensors of a step: vectorised gathers over the slot table, no Python per token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .batch import Batch, GroupSlots, Plan, Segment
from .pool import SlotTable
from .states import StateStore

Int = npt.NDArray[np.int64]


def build(plan: Plan, table: SlotTable, device: torch.device, store: StateStore | None = None) -> Batch:
    """The batch of a plan. `logits_rows` holds the sampled rows of all segments, then the scored ones.

    `store` is that of a model with recurrent layers.

    A token that is still on the device stands as 0 in `tokens`; `future_rows` tells which.
    """
    segments = plan.segments
    q_lens = [segment.rows for segment in segments]
    q = np.array(q_lens, dtype=np.int64)
    first = np.cumsum(q) - q  # [S] where each segment's queries begin
    start = np.array([segment.start for segment in segments], dtype=np.int64)
    # Index of every query in its request's row: start, start + 1, ...; draft nodes lie behind the committed tokens.
    index = np.arange(plan.rows, dtype=np.int64) + np.repeat(start - first, q)
    tokens, positions = _tokens(segments, first, plan.rows), index.copy()
    masks = _drafts(segments, first, tokens, positions)
    kv = start + q
    rows = np.array([segment.request.row for segment in segments], dtype=np.int64)
    width = int(kv.max())
    groups = tuple(
        GroupSlots(
            out_slots=_tensor(slots[np.repeat(rows, q), index].astype(np.int64), device),
            table=_tensor(slots[rows, :width], device),
        )
        for slots in table.slots
    )
    return Batch(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
        groups=groups,
        logits_rows=_tensor(_logits_rows(segments, first), device),
        q_lens=q_lens,
        kv_lens=kv.tolist(),
        tree_masks=masks,
        states=store.step(plan) if store is not None else None,
    )


def future_rows(plan: Plan) -> tuple[list[int], list[int]]:
    """(query index, table row) of each segment whose input token is still on the device."""
    where, rows, at = [], [], 0
    for segment in plan.segments:
        if segment.start >= len(segment.request.tokens):
            where.append(at)
            rows.append(segment.request.row)
        at += segment.rows
    return where, rows


def _tensor(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _tokens(segments: list[Segment], first: Int, rows: int) -> Int:
    tokens = np.zeros(rows, dtype=np.int64)
    for segment, at in zip(segments, first.tolist(), strict=True):
        text = segment.request.tokens
        if segment.count == 1:
            if segment.start < len(text):
                tokens[at] = text[segment.start]
        else:
            tokens[at : at + segment.count] = text[segment.start : segment.start + segment.count]
    return tokens


def _drafts(segments: list[Segment], first: Int, tokens: Int, positions: Int) -> dict[int, npt.NDArray[np.bool_]]:
    """Put the draft nodes in; returns the masks of those that are trees. A chain is causal, as any text."""
    masks = {}
    for i, segment in enumerate(segments):
        if segment.draft is not None:
            at, end = int(first[i]) + segment.count, int(first[i]) + segment.rows
            tokens[at:end] = segment.draft.tokens
            if segment.draft.parents != tuple(range(-1, end - at - 1)):
                positions[at:end] = segment.start + segment.count - 1 + np.array(segment.draft.depths())
                masks[i] = segment.draft.ancestors()
    return masks


def _logits_rows(segments: list[Segment], first: Int) -> Int:
    placed = list(zip(segments, first.tolist(), strict=True))
    parts = [np.arange(at + segment.count - 1, at + segment.rows) for segment, at in placed if segment.samples]
    parts += [at + np.array(rows) for segment, at in placed if (rows := scored_rows(segment))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def scored_rows(segment: Segment) -> range:
    """The queries of a segment whose logits score what follows: a prompt's, or those of a tree of continuations."""
    if segment.scored is not None:
        return range(segment.count - 1, segment.rows)
    known = segment.request.prompt_len - 1 - segment.start  # chunk tokens whose successor is a prompt token too
    return range(min(segment.count, max(0, known)) if segment.prompt_logprobs else 0)
