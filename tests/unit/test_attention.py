"""The reference attention against its definition, and how it cuts a step into pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.interfaces import PluginContext
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.plugins.attention._pieces import PIECE_TOKENS, Pieces
from phloem.plugins.attention._sharing import MIN_SAVED, find_shared
from phloem.plugins.attention.torch_paged import TorchAttention
from phloem.testing.attention import AttentionSuite
from phloem.testing.ragged import Part, Ragged


class TestTorchAttention(AttentionSuite):
    """The conformance suite."""

    plugin = TorchAttention


SPEC = ModelSpec("test", 16, 20000, (LayerSpec(1, 4, 4),))


def pieces_of(lengths: list[int], window: int | None = None):
    """Pieces of a decode step over contexts of these lengths."""
    ragged = Ragged(SPEC, slots=sum(lengths) + len(lengths))
    ragged.step([Part(i, [1] * (n - 1)) for i, n in enumerate(lengths)])
    batch = ragged.step([Part(i, [1]) for i in range(len(lengths))])
    return Pieces(batch).build(batch.groups[0].table, window)


def test_padding_is_bounded() -> None:
    """No piece pads a context to more than twice its length, none grows without bound."""
    lengths = [10, 5000, 7, 300, 301, 299, 20, 4100, 2, 2]
    pieces = pieces_of(lengths)
    assert sum(p.segments for p in pieces) == len(lengths)
    assert sum(p.segments * p.length for p in pieces) <= 2 * sum(lengths)
    assert all(p.segments == 1 or p.segments * p.length <= PIECE_TOKENS for p in pieces)


def test_equal_lengths_are_one_piece_without_a_mask() -> None:
    """The common decode step costs one call and no mask."""
    (piece,) = pieces_of([33] * 8)
    assert piece.segments == 8
    assert piece.mask is None


def test_a_window_bounds_what_is_read() -> None:
    """Windowed layers gather the window, not the context."""
    assert {p.length for p in pieces_of([4000, 3000, 100], window=16)} == {16}


def test_pieces_are_made_once_per_group_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later layers with the same geometry find their pieces ready."""
    built = []
    build = Pieces.build
    monkeypatch.setattr(Pieces, "build", lambda self, table, window: built.append(window) or build(self, table, window))
    spec = ModelSpec("test", 16, 64, (LayerSpec(2, 8, 8),) * 4)
    ragged = Ragged(spec)
    attention = TorchAttention(TorchAttention.Options(), PluginContext("attention", "torch"))
    step = attention.prepare(ragged.step([Part(0, [1, 2, 3])]), ragged.kv)
    q, kv = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    for layer, window in enumerate([None, 2, None, 2]):
        step(layer, q, kv, kv, scale=1.0, window=window)
    assert built == [None, 2]


def shared_ranges(rows: list[list[int]], pasts: list[int]):
    """What is found, with members as a set, and the beginnings of the rests."""
    width = max(map(len, rows))
    table = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)
    found, begins = find_shared(table, pasts)
    return {(frozenset(s.members), s.low, s.high) for s in found}, begins


def test_sharing_follows_the_tree() -> None:
    """A trunk shared by all, a branch by two, and nothing by strangers."""
    n = MIN_SAVED
    trunk, branch = list(range(n)), list(range(5 * n, 6 * n + 9))
    rows = [trunk + branch, trunk + branch, [*trunk, 7 * n], list(range(8 * n, 10 * n))]
    found, begins = shared_ranges(rows, [len(row) - 1 for row in rows])
    assert found == {(frozenset({0, 1, 2}), 0, n), (frozenset({0, 1}), n, 2 * n + 8)}
    assert begins == [2 * n + 8, 2 * n + 8, n, 0]


def test_a_short_common_start_hides_no_longer_one() -> None:
    """Everybody begins with one common token; two go on together for long."""
    n = MIN_SAVED
    long = list(range(1, 2 * n))
    found, begins = shared_ranges([[0, *long], [0, *long], [0, *range(4 * n, 6 * n)]], [2 * n - 1] * 3)
    assert found == {(frozenset({0, 1}), 0, 2 * n - 1)}
    assert begins == [2 * n - 1, 2 * n - 1, 0]


def test_little_is_not_shared_and_own_tokens_never() -> None:
    """Below the threshold nothing happens; a segment's own tokens are not its past."""
    row = list(range(MIN_SAVED + 4))
    assert shared_ranges([row, row], [MIN_SAVED - 1] * 2) == (set(), [0, 0])
    assert shared_ranges([row, row], [0, MIN_SAVED + 4]) == (set(), [0, 0])
    assert shared_ranges([row], [MIN_SAVED]) == (set(), [0])


def test_a_shared_prefix_is_read_once() -> None:
    """32 decodes over one prefix gather it once, and their own tails."""
    ragged = Ragged(SPEC, slots=4096)
    ragged.step([Part(0, [1] * 1000)])
    for sequence in range(1, 32):
        ragged.fork(0, sequence, 1000)
    ragged.step([Part(i, [1] * 5) for i in range(32)])
    batch = ragged.step([Part(i, [1]) for i in range(32)])
    pieces = Pieces(batch).build(batch.groups[0].table, None)
    assert sum(p.segments * p.length for p in pieces) == 1000 + 32 * 6
