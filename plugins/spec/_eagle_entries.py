"""Where an EAGLE head's entries lie: one for each token, at the target's own slot, with the feature of that token.

Token i's entry is made from the feature of token i - 1 and from token i itself, and predicts token i + 1; so it lies
where token i does, on which it depends, and the first token of a text has none. As the head has one layer, an entry is
a function of these two alone and costs no attention: it is written in the step that runs its token. What is drafted
lies in rows behind the pool, which nobody shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from phloem.batch import Batch, GroupSlots, IntArray
from phloem.interfaces import Attention, PluginContext, TokenRows
from phloem.model_spec import LayerSpec
from phloem.registry import build

from ._eagle_head import Head
from ._eagle_shape import Shape


def row_layers(shape: Shape) -> tuple[LayerSpec, ...]:
    """What is kept of a token: its entry, and its feature, from which the next token's entry is made."""
    return (LayerSpec(shape.kv_heads, shape.head_dim, shape.head_dim), LayerSpec(1, shape.hidden, 0))


@dataclass(slots=True)
class Query:
    """A token whose successor is asked for: the last one of a text, a leader's, or a drafted one."""

    token: int
    position: int
    before: int  # the row that has the feature of the token before it
    committed: IntArray  # slots of the text's tokens from the second on, as far as the target has run them
    path: list[int]  # rows of the drafted entries behind these; its own is the last


class Entries:
    """The head at work over the target's KV store. `keep` runs where steps do, `ask` on the loop's thread."""

    def __init__(self, head: Head, rows: TokenRows, device: str) -> None:
        self.head, self.rows = head, rows
        self._kv, self._layer = rows.kv, rows.layer
        self._features = rows.kv.keys[rows.layer + 1]  # [slots + own, 1, hidden]
        self._device = torch.device(device)
        self._scale = float(head.shape.head_dim) ** -0.5
        context = PluginContext("attention", "auto", model=rows.model.spec, device=device)
        self._attention: Attention = build("attention", "auto", context)

    def keep(self, batch: Batch, states: torch.Tensor) -> None:
        """Write feature and entry of all query tokens of a step, from states [T, layers, hidden]."""
        slots = batch.groups[self.rows.group].out_slots
        self._features[slots] = self.head.features(states)[:, None].to(self._features.dtype)
        before = predecessors(batch, self.rows.group)
        turn = self.head.turn(batch.positions)
        keys, values = self.head.entries(batch.tokens, self._features[before, 0], turn)
        self._kv.write(self._layer, slots, keys.to(self._features.dtype), values.to(self._features.dtype))

    @torch.inference_mode()
    def ask(self, queries: Sequence[Query]) -> torch.Tensor:
        """Logits [N, draft vocab] after each; its entry and the layer's output are in its own row then."""
        batch = self._batch(queries)
        step, window = self._attention.prepare(batch, self._kv), self.rows.window

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return step(self._layer, q, k, v, scale=self._scale, window=window)

        before = torch.tensor([query.before for query in queries], device=self._device)
        turn = self.head.turn(batch.positions)
        output = self.head.step(batch.tokens, self._features[before, 0], turn, attend)
        self._features[batch.groups[0].out_slots] = output[:, None].to(self._features.dtype)
        return self.head.logits(output)

    def _batch(self, queries: Sequence[Query]) -> Batch:
        """Each query as a segment of one token, so that every path has a table of its own and no tree needs a mask."""
        lengths = [len(query.committed) + len(query.path) for query in queries]
        table: IntArray = np.zeros((len(queries), max(lengths)), dtype=np.int32)
        for row, query in zip(table, queries, strict=True):
            known = len(query.committed)
            row[:known] = query.committed
            row[known : known + len(query.path)] = query.path
        numbers = [(query.token, query.position, query.path[-1]) for query in queries]
        tokens, positions, own = torch.tensor(numbers, device=self._device).unbind(1)
        where = GroupSlots(own, torch.from_numpy(table).to(self._device))
        groups = (where,) * (self.rows.group + 1)
        rows = torch.arange(len(queries), device=self._device)
        return Batch(tokens, positions, groups, rows, [1] * len(queries), lengths)


def predecessors(batch: Batch, group: int) -> torch.Tensor:
    """[T] int64: for each query of a step the slot of the token before it; its own where it is the first of a text."""
    slots = batch.groups[group]
    before = slots.out_slots.roll(1)
    firsts, device = batch.starts[:-1], before.device
    pasts = [kv - q for kv, q in zip(batch.kv_lens, batch.q_lens, strict=True)]
    first, past = torch.tensor([firsts, pasts], device=device).unbind(0)
    last = slots.table[torch.arange(len(pasts), device=device), (past - 1).clamp_(min=0)].long()
    before[first] = torch.where(past > 0, last, slots.out_slots[first])
    for segment, mask in batch.tree_masks.items():
        end = batch.starts[segment + 1]
        nodes = end - len(mask)
        parents = torch.from_numpy(nodes + _parents(mask)).to(device)  # of a root that is the committed token before
        before[nodes:end] = slots.out_slots[parents]
    return before


def _parents(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[m, m] of what each node sees -> [m] parents, the last of its ancestors; -1 for the text's end."""
    above = mask & ~np.eye(len(mask), dtype=np.bool_)
    last: npt.NDArray[np.int64] = len(mask) - 1 - above[:, ::-1].argmax(1)
    parents: npt.NDArray[np.int64] = np.where(above.any(1), last, -1)
    return parents
