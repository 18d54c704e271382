"""Grammar masks of a step: one bitmask per row of logits, filled on the host while the device works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .batch import Segment
from .drafts import Draft
from .errors import PhloemError, StepError
from .interfaces import Matcher

DEAD = -1  # in place of a count: the row of a draft node that cannot be reached


class Masks(NamedTuple):
    """The masks of a step's N sampled rows, valid until the step after next is filled."""

    bits: torch.Tensor  # [N, ceil(vocab / 32)] int32, on the host; all ones where nothing is forbidden
    counts: npt.NDArray[np.int64]  # [N] allowed tokens, or DEAD

    def tokens(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """The allowed tokens of each row, ascending, int64. Costs some ten microseconds a row that allows few."""
        if not rows:
            return []
        words = self.bits.numpy()[rows].ravel()
        word = np.flatnonzero(words != 0)  # of booleans numpy finds the true ones several times as fast
        bit = np.flatnonzero(np.unpackbits(words[word].view(np.uint8), bitorder="little").view(np.bool_))
        tokens = word[bit // 32] % self.bits.shape[1] * 32 + bit % 32
        return list(torch.split(torch.from_numpy(tokens), self.counts[rows].tolist()))


class MaskFiller:
    """Fills the masks of every step into two buffers in turn: running ahead, the step before may still read its own.

    One thread fills: at 3 to 7 us a row (xgrammar, llguidance), two were 1.4 to 8 times as slow with 64 to 4 rows.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._pinned = device.type == "cuda"
        self._width = (vocab_size + 31) // 32
        self._buffers = [torch.empty(0, self._width, dtype=torch.int32)] * 2

    def fill(self, segments: Sequence[Segment]) -> Masks | None:
        """The masks of the segments that sample, N = sum(1 + nodes); None when no request is constrained.

        Rows of unconstrained requests are all ones, and so are dead ones: draft nodes that the grammar forbids, that
        follow an end token, or that lie below such. Before a forced node only its token is allowed. Matchers are left
        as found. A matcher that raises fails its own request only: its rows are zero and `request.error` says why,
        which the sampler hands on. Called once a step.
        """
        if all(segment.request.matcher is None for segment in segments):
            return None
        rows = sum(1 + len(segment.draft or ()) for segment in segments)
        self._buffers.reverse()
        if len(self._buffers[0]) < rows:
            self._buffers[0] = torch.empty(2 * rows, self._width, dtype=torch.int32, pin_memory=self._pinned)
        bits = self._buffers[0][:rows]
        table = bits.numpy()
        table.fill(-1)
        dead: list[int] = []
        row = 0
        for segment in segments:
            count = 1 + len(segment.draft or ())
            if segment.request.matcher is not None:
                dead += [row + i for i in _fill(segment, segment.request.matcher, table[row : row + count])]
            row += count
        if spare := -self._vocab_size % 32:  # a matcher may leave anything in the bits behind the vocabulary
            table[:, -1] &= np.int32(2 ** (32 - spare) - 1)
        counts = np.bitwise_count(table.view(np.uint32)).sum(axis=1, dtype=np.int64)
        counts[dead] = DEAD
        return Masks(bits, counts)


def _fill(segment: Segment, matcher: Matcher, rows: npt.NDArray[np.int32]) -> list[int]:
    """Fill a segment's rows; returns the dead ones."""
    request, draft = segment.request, segment.draft
    try:
        live = _fill_tree(matcher, draft, rows, request.stop_ids)
    except Exception as error:
        rows[:] = 0
        request.error = (
            error if isinstance(error, PhloemError) else StepError(f"the grammar of {request.id} failed: {error!r}")
        )
        return []
    if draft is not None:
        for token, parent in [(draft.tokens[i], draft.parents[i]) for i in range(draft.forced) if i + 1 in live]:
            rows[parent + 1] = 0
            rows.view(np.uint32)[parent + 1, token // 32] = 1 << token % 32
    return [row for row in range(len(rows)) if row not in live]


def _fill_tree(
    matcher: Matcher, draft: Draft | None, rows: npt.NDArray[np.int32], stop_ids: frozenset[int]
) -> set[int]:
    """Depth first over the draft: accept on the way down, roll back on the way up. rows[0] is the root's.

    Returns the rows that can be reached.
    """
    matcher.fill(rows[0])
    live = {0}
    if draft is None:
        return live
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
        live.add(node + 1)
        matcher.fill(rows[node + 1])
        stack.extend(children[node + 1])
    if len(path) > 1:
        matcher.rollback(len(path) - 1)
    return live
