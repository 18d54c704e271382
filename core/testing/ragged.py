"""Batches without an engine: sequences over scattered pages, extended step by step. For tests of kernels and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..batch import Batch, GroupSlots
from ..drafts import Draft
from ..model_spec import ModelSpec
from ..pool import KVStore
from ..states import StateStore


class Part(NamedTuple):
    """What one sequence contributes to a step: `tokens` that stay, then draft nodes that do not."""

    sequence: int
    tokens: Sequence[int]
    draft: Draft | None = None


class Ragged:
    """Sequences with KV in randomly scattered pages; slots nobody owns hold large garbage, so a stray read shows."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        page_size: int = 1,
        slots: int = 1024,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._page_size = page_size
        self._generator = np.random.default_rng(seed)
        pages = slots // page_size
        self._free = [list(self._generator.permutation(pages)) for _ in spec.groups]
        self._slots: dict[int, list[list[int]]] = {}  # sequence -> per group, slots in order
        self._groups = len(spec.groups)
        self.lengths: dict[int, int] = {}  # committed tokens of each sequence
        self._states: dict[int, int] = {}  # sequence -> slot of its state
        self._stateful = bool(spec.states)
        self.store = StateStore(spec.states, slots, torch.device("cpu"))
        self._state_slots = list(self._generator.permutation(slots))
        size = [pages * page_size] * self._groups
        self.kv = KVStore(spec, size, [layer.group for layer in spec.layers], dtype, torch.device("cpu"))
        for tensor in (*self.kv.keys, *self.kv.values, *(each for layer in self.store.tensors for each in layer)):
            tensor.fill_(1000.0)

    def step(self, parts: Sequence[Part]) -> Batch:
        """The batch that extends each part's sequence. Draft nodes' slots are written over by the next step.

        Of recurrent layers a state is kept after the tokens that stay; trees are not for them.
        """
        tokens: list[int] = []
        positions: list[int] = []
        q_lens: list[int] = []
        kv_lens: list[int] = []
        starts = [self._states.get(part.sequence, -1) for part in parts]
        kept: list[int] = []
        trees: dict[int, np.ndarray] = {}
        for index, part in enumerate(parts):
            start = self.lengths.get(part.sequence, 0)
            end = start + len(part.tokens)
            tokens.extend(part.tokens)
            positions.extend(range(start, end))
            if part.draft is not None:
                tokens.extend(part.draft.tokens)
                positions.extend(end - 1 + depth for depth in part.draft.depths())
                if not part.draft.is_chain:
                    trees[index] = part.draft.ancestors()
            kept.append(sum(q_lens) + len(part.tokens) - 1)
            q_lens.append(len(part.tokens) + (len(part.draft) if part.draft else 0))
            kv_lens.append(start + q_lens[-1])
            self._grow(part.sequence, kv_lens[-1])
            self.lengths[part.sequence] = end
        groups = tuple(self._group(g, parts, q_lens, kv_lens) for g in range(self._groups))
        rows = torch.arange(len(tokens))
        batch = Batch(torch.tensor(tokens), torch.tensor(positions), groups, rows, q_lens, kv_lens, trees)
        if self._stateful:
            self._states |= {part.sequence: int(self._state_slots.pop()) for part in parts}
            batch.states = self.store.made(starts, kept, [self._states[part.sequence] for part in parts])
        return batch

    def fork(self, source: int, target: int, length: int) -> None:
        """Let a new sequence begin with the first `length` tokens of another, in the same slots (whole pages)."""
        assert length % self._page_size == 0
        assert not self._stateful or length == self.lengths[source], "a state is that of a whole text"
        self._slots[target] = [slots[:length] for slots in self._slots[source]]
        if self._stateful:
            self._states[target] = self._states[source]
        self.lengths[target] = length

    def _grow(self, sequence: int, length: int) -> None:
        owned = self._slots.setdefault(sequence, [[] for _ in range(self._groups)])
        for slots, free in zip(owned, self._free, strict=True):
            while len(slots) < length:
                first = int(free.pop()) * self._page_size
                slots.extend(range(first, first + self._page_size))

    def _group(self, group: int, parts: Sequence[Part], q_lens: list[int], kv_lens: list[int]) -> GroupSlots:
        table = torch.zeros(len(parts), max(kv_lens), dtype=torch.int32)
        out: list[int] = []
        for i, part in enumerate(parts):
            slots = self._slots[part.sequence][group][: kv_lens[i]]
            table[i, : kv_lens[i]] = torch.tensor(slots)
            out.extend(slots[kv_lens[i] - q_lens[i] :])
        return GroupSlots(torch.tensor(out), table)
