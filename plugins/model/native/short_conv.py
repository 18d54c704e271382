"""Short convolutions over ragged tokens: a causal filter of a few taps for each channel.

The state after a token is the last `kernel - 1` inputs. A step's inputs are laid out with the state of each segment in
front of them, so that every tap of every query is one gather, whatever the segments' lengths.
"""

from __future__ import annotations

import torch

from phloem.batch import Batch


class ConvStep:
    """Where a step's inputs and states lie, once for all layers with the same kernel."""

    def __init__(self, batch: Batch, kernel: int) -> None:
        assert batch.states is not None, "a model with recurrent layers was given a batch without states"
        device, back = batch.tokens.device, kernel - 1
        lengths = torch.tensor(batch.q_lens, device=device)
        segment = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        # Row of each query's own input; segment s has its state in the `back` rows before its first one.
        self._own = torch.arange(len(segment), device=device) + (segment + 1) * back
        first = lengths.cumsum(0) - lengths + torch.arange(len(lengths), device=device) * back
        self._before = (first[:, None] + torch.arange(back, device=device)).reshape(-1)
        self._kept = self._own[batch.states.rows][:, None] + torch.arange(1 - back, 1, device=device)
        self._back = back

    def __call__(
        self, x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Filter x [T, C], behind the states [S, kernel - 1, C], with weight [C, kernel].

        The last tap is for the present token. Returns the result [T, C] and the states to keep, [K, kernel - 1, C].
        """
        rows = x.new_empty(len(x) + len(self._before), x.shape[1])
        rows[self._before] = state.flatten(0, 1).to(x.dtype)
        rows[self._own] = x
        out = x * weight[:, -1]
        for tap in range(self._back):
            out.addcmul_(rows[self._own - (self._back - tap)], weight[:, tap])
        return out if bias is None else out.add_(bias), rows[self._kept]
