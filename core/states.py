"""States of recurrent layers: the tensors that hold them, and what one step reads and writes of them.

Where attention keeps K and V of every token, such a layer keeps one state of the whole text. It cannot be cut or taken
back, so it is never changed in place: a step reads the state a segment starts from in one slot, and writes the states
that are worth keeping to others. A cache hit, a draft that is rejected and a fork copy nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .batch import Plan
from .model_spec import StateSpec
from .state_slots import kept, start_slot


class StateStore:
    """`tensors[i]` are those of recurrent layer i: [slots, *shape], float32, as rounding errors add up."""

    def __init__(self, layers: Sequence[StateSpec], slots: int, device: torch.device) -> None:
        self.tensors = [
            tuple(torch.zeros(slots, *shape, dtype=torch.float32, device=device) for shape in layer.shapes)
            for layer in layers
        ]
        self._device = device

    def step(self, plan: Plan) -> StateStep:
        """What a plan's segments start from, and which states they leave. O(segments and states kept)."""
        rows: list[int] = []
        slots: list[int] = []
        first = 0
        for segment in plan.segments:
            for row, slot in kept(segment):
                rows.append(first + row)
                slots.append(slot)
            first += segment.rows
        starts = [start_slot(segment.request, segment.start) for segment in plan.segments]
        return self.made(starts, rows, slots)

    def made(self, starts: Sequence[int], rows: Sequence[int], slots: Sequence[int]) -> StateStep:
        """A step from plain numbers."""
        made = [torch.tensor(values, dtype=torch.int64).to(self._device) for values in (starts, rows, slots)]
        return StateStep(self, made[0], made[1], made[2], list(rows))


@dataclass(slots=True)
class StateStep:
    """What recurrent layers read and write in a step of S segments. Used by the model, once a layer."""

    store: StateStore
    starts: torch.Tensor  # [S] int64: the slot of the state each segment starts from; -1: zeros
    rows: torch.Tensor  # [K] int64, ascending: queries after which the state is kept
    out_slots: torch.Tensor  # [K] int64
    kept: list[int]  # `rows` on the host

    def initial(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The states that the segments start from, [S, *shape] each, new."""
        there = self.starts.clamp(min=0)
        fresh = self.starts < 0
        made = []
        for tensor in self.store.tensors[layer]:
            taken = tensor.index_select(0, there)
            taken[fresh] = 0.0
            made.append(taken)
        return tuple(made)

    def keep(self, layer: int, states: Sequence[torch.Tensor]) -> None:
        """Store the states after `rows`, [K, *shape] each. After `initial` of the same layer."""
        for tensor, state in zip(self.store.tensors[layer], states, strict=True):
            tensor.index_copy_(0, self.out_slots, state.to(tensor.dtype))
