"""Grammar masks of a step: one bitmask per row of logits, filled on the host while the device works."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .batch import Segment
from .drafts import Draft
from .errors import PhloemError, StepError
from .interfaces import Matcher


def fill_masks(segments: Sequence[Segment], vocab_size: int) -> torch.Tensor | None:
    """Allowed-token bitmasks [N, ceil(vocab / 32)] int32 on the host; None when no request is constrained.

    `segments` are those that sample, N = sum(1 + nodes). Rows of unconstrained requests, and of draft nodes that can
    not be reached (the grammar forbids them, or they follow an end token), are all ones. Matchers are left as found.
    A matcher that raises fails its own request only: its rows are zero and `request.error` says why, which the
    sampler hands on. Called once a step.
    """
    if all(segment.request.matcher is None for segment in segments):
        return None
    rows = sum(1 + (len(s.draft) if s.draft else 0) for s in segments)
    masks = np.full((rows, (vocab_size + 31) // 32), -1, dtype=np.int32)
    row = 0
    for segment in segments:
        request, draft = segment.request, segment.draft
        count = 1 + (len(draft) if draft else 0)
        if request.matcher is not None:
            own = masks[row : row + count]
            try:
                _fill_tree(request.matcher, draft, own, request.stop_ids)
            except Exception as error:
                own[:] = 0
                known = isinstance(error, PhloemError)
                request.error = error if known else StepError(f"the grammar of {request.id} failed: {error!r}")
        row += count
    return torch.from_numpy(masks)


def _fill_tree(matcher: Matcher, draft: Draft | None, rows: npt.NDArray[np.int32], stop_ids: frozenset[int]) -> None:
    """Depth first over the draft: accept on the way down, roll back on the way up. rows[0] is the root's."""
    matcher.fill(rows[0])
    if draft is None:
        return
    children: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node in range(len(draft) - 1, -1, -1):  # backwards, so that popping from the end visits them in order
        children[draft.parents[node] + 1].append(node)
    path = [-1]
    stack = list(children[0])
    while stack:
        node = stack.pop()
        up = len(path) - 1 - path.index(draft.parents[node])
        if up:
            matcher.rollback(up)
            del path[-up:]
        token = draft.tokens[node]
        if token in stop_ids or not matcher.accept(token):
            continue
        path.append(node)
        matcher.fill(rows[node + 1])
        stack.extend(children[node + 1])
    if len(path) > 1:
        matcher.rollback(len(path) - 1)
