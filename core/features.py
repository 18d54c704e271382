"""Hidden states of the target for drafters that read them: those of verified tokens, once a step (design §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class LendsParts(Protocol):
    """What a model with the capability `parts` in its spec has besides, for heads that were trained on top of it."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding matrix as they are stored, unscaled: [N] int64 -> [N, hidden] in the model's dtype."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [N, in] -> x @ weight.T + bias [N, out], for a weight [out, in], as the model multiplies its own matrices.

        All in the model's dtype and on its device. Called once for each matrix, when an engine starts.
        """


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


def at(wanted: tuple[int, ...], layers: tuple[int, ...], states: torch.Tensor) -> torch.Tensor:
    """Of states [T, len(layers), hidden] those at the layers that are wanted, in their order."""
    if wanted == layers:
        return states
    import torch

    return states[:, torch.tensor([layers.index(layer) for layer in wanted], device=states.device)]
