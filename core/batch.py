"""What crosses between scheduler, executor and plugins within a step: plan, ragged batch, results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .drafts import Draft

if TYPE_CHECKING:
    import torch

    from .request import Request
    from .scoring import Tree
    from .states import StateStep

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class Segment:
    """What one request contributes to a step: tokens [start, start + count) of its text, then its draft nodes.

    A segment whose committed tokens reach the end of the request's text (`samples`) is followed by sampling; only
    such a segment may carry a draft, or, in its place, one of a scoring call whose tree it is (`scored`).
    """

    request: Request
    start: int
    count: int
    samples: bool
    draft: Draft | None = None
    prompt_logprobs: bool = False  # logits are wanted at every token of the chunk
    scored: Tree | None = None  # continuations to score; its nodes are the draft
    epoch: int = 0  # request.retractions at planning; a retraction since then makes the results void

    @property
    def rows(self) -> int:
        """Query tokens of this segment in the step, draft nodes included."""
        return self.count + (len(self.draft) if self.draft else 0)


@dataclass(slots=True)
class Plan:
    """The segments of one step, in the order they lie in the batch."""

    segments: list[Segment] = field(default_factory=list)
    rows: int = 0  # query tokens of the step

    def __bool__(self) -> bool:
        return bool(self.segments)

    def add(self, segment: Segment) -> None:
        """Append a segment."""
        self.segments.append(segment)
        self.rows += segment.rows

    def remove(self, request: Request) -> None:
        """Take a request out again."""
        self.segments = [segment for segment in self.segments if segment.request is not request]
        self.rows = sum(segment.rows for segment in self.segments)


@dataclass(slots=True)
class GroupSlots:
    """Where one state group's KV lies for this step."""

    out_slots: torch.Tensor  # [T] int64: slot that receives the K and V of each query token
    table: torch.Tensor  # [S, max_kv] int32: slots of each segment's context in order, padded with 0


@dataclass(slots=True)
class Batch:
    """The ragged tensors of one step. S segments, T query tokens; segment s owns queries starts[s]:starts[s + 1].

    A segment's context is `kv_lens[s]` entries of `table[s]`: all tokens before the segment, its own committed
    tokens, then its draft nodes. Query i of a segment that has no draft, or a chain, sees context entries up to its
    own. A node of a tree sees all committed tokens, itself and its ancestors: `tree_masks[s]`, [m, m] bool over the m
    draft nodes. Positions of draft nodes are those of their depth, so siblings share one.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    groups: tuple[GroupSlots, ...]
    logits_rows: torch.Tensor  # [N] int64: queries whose logits are wanted
    q_lens: list[int]  # [S] host
    kv_lens: list[int]  # [S] host, own tokens and draft nodes included
    tree_masks: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    states: StateStep | None = None  # for models with recurrent layers

    @property
    def starts(self) -> list[int]:
        """[S + 1] cumulated query counts."""
        out = [0]
        for q in self.q_lens:
            out.append(out[-1] + q)
        return out


@dataclass(slots=True)
class StepStats:
    """What observers and metrics learn of one step. Times in seconds, counts in tokens."""

    step: int = 0
    requests: int = 0
    forward_tokens: int = 0  # query tokens run, drafts included
    prefill_tokens: int = 0  # prompt tokens run
    decode_tokens: int = 0  # tokens emitted
    draft_tokens: int = 0
    accepted_tokens: int = 0
    scored_tokens: int = 0  # of continuations to score, run: shared ones once, last ones not at all
    waiting: int = 0
    plan_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Time of the step outside the model and the sampler."""
        return self.plan_s + self.build_s + self.commit_s
