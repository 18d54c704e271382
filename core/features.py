"""Hidden states of the target for drafters that read them: those of verified tokens, once a step (design §5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .batch import Batch, Segment

if TYPE_CHECKING:
    import torch

    from .interfaces import AttentionStep
    from .request import Request


class HiddenStates(Protocol):
    """What a model with the capability `hidden_states` in its spec, `hidden_size` and `depth` there too, has besides.

    Layers count as transformers' `output_hidden_states` does: 0 is what enters the first layer, i what layer i - 1
    gives, and the number of layers the final states after the last norm, which the output head reads.
    """

    def forward_seen(
        self, batch: Batch, attend: AttentionStep, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the states [T, len(layers), hidden] of all query tokens at these layers, in their order."""


class Seen(NamedTuple):
    """States of tokens of one request that are sure to stay: its text's from `start` on."""

    request: Request  # to be read only
    start: int
    states: torch.Tensor  # [n, layers, hidden] in the model's dtype; to be copied by whoever keeps it


class SeesStates(Protocol):
    """What a drafter with the capability `features` has besides; `requires = {"model:hidden_states"}` goes with it."""

    layers: tuple[int, ...]  # which, as `HiddenStates` counts; known once it is made

    def observe(self, seen: Sequence[Seen]) -> None:
        """States of the tokens that a step has verified: chunks of prompts, and outputs with their accepted drafts.

        Called once a step on the loop's thread, before anything is proposed for the next one. Rejected nodes are never
        among them, and no token comes twice, unless its request was retracted. Where a prefix came out of the cache
        nothing is told of it: the first `start` of a request is its length. What it raises switches the drafter off for
        all of these requests.
        """


def verified(states: torch.Tensor, first: int, segment: Segment, nodes: Sequence[int]) -> list[Seen]:
    """Of a step's states [T, ...] those of one segment's tokens that stay, its rows beginning at `first`; at most one.

    Called when the segment is committed, `nodes` being the accepted ones.
    """
    import torch  # `interfaces` must be read without it

    rows = [*range(first, first + segment.count), *(first + segment.count + node for node in nodes)]
    rows = rows[: segment.request.computed - segment.start]  # nothing behind the text's end
    if segment.scored is not None or not rows:
        return []
    return [Seen(segment.request, segment.start, states[torch.tensor(rows, device=states.device)])]
