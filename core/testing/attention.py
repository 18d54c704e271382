"""Conformance of kind `attention`: any implementation against one query at a time in float64, over odd shapes.

class TestMine(AttentionSuite):
    plugin = MyAttention
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from ..batch import Batch
from ..drafts import Draft
from ..model_spec import GroupSpec, LayerSpec, ModelSpec
from ..pool import KVStore
from .plugin import PluginSuite
from .ragged import Part, Ragged


class NaiveAttention:
    """The definition, word for word, and too slow for anything else: kind `attention` without options."""

    capabilities = frozenset({"tree_mask", "window", "softcap", "gqa"})

    def prepare(self, batch: Batch, kv: KVStore) -> NaiveStep:
        """Keeps the batch; everything happens in the call."""
        return NaiveStep(batch, kv)


class NaiveStep:
    """One step's attention, a query and a head at a time, in float64."""

    def __init__(self, batch: Batch, kv: KVStore) -> None:
        self._batch = batch
        self._kv = kv

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionStep`."""
        group = self._batch.groups[self._kv.group_of[layer]]
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        self._kv.write(layer, group.out_slots, k.to(keys.dtype), v.to(values.dtype))
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        share = q.shape[1] // k.shape[1]
        for segment, start in enumerate(self._batch.starts[:-1]):
            for i in range(self._batch.q_lens[segment]):
                slots = group.table[segment][self._seen(segment, i, window)].long()
                for head in range(q.shape[1]):
                    scores = keys[slots, head // share].double() @ q[start + i, head].double() * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = scores.softmax(0)
                    out[start + i, head] = (weights @ values[slots, head // share].double()).to(q.dtype)
        return out

    def _seen(self, segment: int, query: int, window: int | None) -> list[int]:
        """Context entries that a segment's query sees."""
        batch, length = self._batch, self._batch.kv_lens[segment]
        queries = batch.q_lens[segment]
        own = batch.positions[batch.starts[segment] : batch.starts[segment] + queries].tolist()
        position = [*range(length - queries), *own]
        tree = batch.tree_masks.get(segment)
        drafts = 0 if tree is None else len(tree)
        me = length - queries + query
        first_node = length - drafts
        if tree is None or me < first_node:
            seen = list(range(me + 1))
        else:
            seen = [*range(first_node), *(first_node + int(j) for j in np.flatnonzero(tree[me - first_node]))]
        return [j for j in seen if window is None or position[me] - position[j] < window]


TREE = Draft((5, 6, 7, 8, 9), (-1, 0, 0, -1, 1))
LATE = Draft((5, 6, 7, 8), (-1, -1, 1, 2))  # a path whose nodes lie later than they are deep
Past = tuple[int, int, Draft | None]  # tokens before the step, tokens of the step, draft
CASES: dict[str, Sequence[Past]] = {
    "one token": [(0, 1, None)],
    "one prompt": [(0, 21, None)],
    "prompts": [(0, 3, None), (0, 40, None), (0, 3, None), (0, 1, None)],
    "chunk with a past": [(19, 7, None)],
    "decode": [(n, 1, None) for n in (1, 70, 2, 33, 33, 17, 5, 64)],
    "mixed": [(31, 1, None), (0, 18, None), (12, 9, None), (64, 1, None), (12, 9, None), (2, 2, None)],
    "trees": [(20, 1, TREE), (3, 1, Draft.chain((5, 6, 7))), (20, 1, TREE.truncated(3)), (0, 4, TREE)],
    "trees in company": [(40, 1, None), (17, 1, TREE), (0, 6, LATE), (25, 1, TREE), (9, 1, TREE), (9, 1, LATE)],
}


class AttentionSuite(PluginSuite):
    """Subclass it in a test module and set `plugin` to the class under test."""

    kind = "attention"
    tolerance: ClassVar[float] = 2e-5  # absolute, for float32 inputs of unit size

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("window", [None, 1, 2, 5, 16])
    def test_mask_and_pages(self, case: str, page_size: int, window: int | None) -> None:
        """Every mix of segments, over pages and windows."""
        self._compare(CASES[case], page_size=page_size, window=window)

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (8, 1), (1, 1)])
    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_heads_and_softcap(self, heads: tuple[int, int], softcap: float | None) -> None:
        """Ratios of query to KV heads, with and without a soft-cap."""
        for case in ("mixed", "trees in company"):
            self._compare(CASES[case], heads=heads, softcap=softcap)

    def test_value_width(self) -> None:
        """Values may be narrower than keys."""
        self._compare(CASES["mixed"], widths=(16, 8))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_stored_dtype(self, dtype: torch.dtype) -> None:
        """KV of another dtype than the queries."""
        self._compare(CASES["trees in company"], dtype=dtype)

    @pytest.mark.parametrize("page_size", [1, 4])
    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_shared_prefixes(self, page_size: int, softcap: float | None) -> None:
        """Contexts that branch like a tree over the same slots, extended by decodes, chunks and drafts."""
        trunk = [(300, 1, None)]
        ragged = self._history(trunk, page_size, (4, 2), (16, 16), 1)
        for target, (source, length) in enumerate([(0, 300), (0, 300), (0, 160), (0, 160), (4, 160), (0, 4)], start=1):
            ragged.fork(source, target, length)
        self._extend(ragged, {3: 140, 4: 20, 5: 20, 6: 200})
        ragged.fork(3, 7, 300)
        steps: list[Past] = [(0, 1, None), (0, 1, None), (0, 1, TREE), (0, 7, None), (0, 1, None), (0, 70, None)]
        self._run(ragged, [*steps, (0, 1, None), (0, 1, TREE)], (4, 2), (16, 16), [None], softcap)

    def test_layers_of_different_groups(self) -> None:
        """Two layers with KV in different pools and different windows, in one step."""
        ragged = self._history(CASES["mixed"], page_size=4, heads=(4, 2), widths=(16, 16), groups=2)
        self._run(ragged, CASES["mixed"], (4, 2), (16, 16), [None, 5], None)

    def test_what_a_window_has_dropped_is_never_read(self) -> None:
        """Entries before every query's window may point anywhere, even at NaN."""
        self._needs("window")
        past, window = 40, 8
        ragged = self._history([(past, 1, None)], page_size=1, heads=(2, 2), widths=(8, 8), groups=1)
        batch = ragged.step([Part(0, [1])])
        slots = batch.groups[0].table[0, : past + 1 - window].long()
        ragged.kv.keys[0][slots] = float("nan")
        ragged.kv.values[0][slots] = float("nan")
        q = torch.randn(1, 2, 8)
        out = self.make().prepare(batch, ragged.kv)(0, q, q, q, scale=0.5, window=window)
        assert torch.isfinite(out).all()

    def _compare(
        self,
        case: Sequence[Past],
        *,
        page_size: int = 1,
        heads: tuple[int, int] = (4, 2),
        widths: tuple[int, int] = (16, 16),
        window: int | None = None,
        softcap: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        ragged = self._history(case, page_size, heads, widths, 1, dtype)
        self._run(ragged, case, heads, widths, [window], softcap)

    def _history(
        self,
        case: Sequence[Past],
        page_size: int,
        heads: tuple[int, int],
        widths: tuple[int, int],
        groups: int,
        dtype: torch.dtype = torch.float32,
    ) -> Ragged:
        """Sequences whose pasts hold random KV."""
        layers = tuple(LayerSpec(heads[1], *widths, group) for group in range(groups))
        spec = ModelSpec("test", 16, 256, layers, tuple(GroupSpec(f"g{i}") for i in range(groups)))
        ragged = Ragged(spec, page_size=page_size, slots=1024, dtype=dtype)
        self._extend(ragged, {i: past for i, (past, _, _) in enumerate(case) if past})
        return ragged

    def _extend(self, ragged: Ragged, tokens: dict[int, int]) -> None:
        """Append tokens with random KV to sequences."""
        if not tokens:
            return
        batch = ragged.step([Part(sequence, [1] * count) for sequence, count in tokens.items()])
        torch.manual_seed(1)
        for keys, values, group in zip(ragged.kv.keys, ragged.kv.values, batch.groups, strict=True):
            slots = group.out_slots
            keys[slots] = torch.randn(len(slots), *keys.shape[1:]).to(keys.dtype)
            values[slots] = torch.randn(len(slots), *values.shape[1:]).to(values.dtype)

    def _run(
        self,
        ragged: Ragged,
        case: Sequence[Past],
        heads: tuple[int, int],
        widths: tuple[int, int],
        windows: Sequence[int | None],
        softcap: float | None,
    ) -> None:
        """The step of a case, by the plugin and by definition: equal outputs and equal stores."""
        if any(draft for _, _, draft in case):
            self._needs("tree_mask")
        self._needs(*(["softcap"] if softcap else []), *(["window"] if any(windows) else []))
        self._needs(*(["gqa"] if heads[0] != heads[1] else []))
        batch = ragged.step([Part(i, [1] * count, draft) for i, (_, count, draft) in enumerate(case)])
        torch.manual_seed(2)
        rows = len(batch.tokens)
        naive = NaiveAttention().prepare(batch, ragged.kv)
        step = self.make().prepare(batch, ragged.kv)
        for layer, window in enumerate(windows):
            q = torch.randn(rows, heads[0], widths[0])
            k, v = torch.randn(rows, heads[1], widths[0]), torch.randn(rows, heads[1], widths[1])
            before = ragged.kv.keys[layer].clone(), ragged.kv.values[layer].clone()
            expected = naive(layer, q, k, v, scale=0.3, window=window, softcap=softcap)
            stored = ragged.kv.keys[layer].clone(), ragged.kv.values[layer].clone()
            ragged.kv.keys[layer].copy_(before[0])
            ragged.kv.values[layer].copy_(before[1])
            out = step(layer, q, k, v, scale=0.3, window=window, softcap=softcap)
            assert torch.equal(ragged.kv.keys[layer], stored[0]), "keys were not stored as the contract says"
            assert torch.equal(ragged.kv.values[layer], stored[1]), "values were not stored as the contract says"
            assert out.shape == expected.shape
            torch.testing.assert_close(out, expected, rtol=0, atol=self.tolerance)

    def _needs(self, *capabilities: str) -> None:
        for name in capabilities:
            if name not in self.plugin.capabilities:
                pytest.skip(f"no capability {name}")
