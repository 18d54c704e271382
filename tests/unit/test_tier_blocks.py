"""Blocks of KV: copied out of the pools and back, sealed, and unsealed only where they are whole and the right ones."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest
import torch

from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec
from phloem.pool import KVStore
from phloem.tier_blocks import Layout, Rows

SIZE, SLOTS = 8, 64
PARENT, KEYS = b"p" * 16, array("i", range(SIZE))


def made(dtype: torch.dtype = torch.float32, windows: tuple[int | None, ...] = (None, 4)) -> tuple[KVStore, Layout]:
    """A store of three layers of different widths, filled with numbers, in as many groups as there are windows."""
    groups = tuple(GroupSpec(f"g{i}", "window" if w else "full", w) for i, w in enumerate(windows))
    layers = tuple(LayerSpec(1 + i, 3, 5, i % len(windows)) for i in range(3))
    spec = ModelSpec("toy", 8, 100, layers, groups)
    kv = KVStore(spec, [SLOTS] * len(windows), [layer.group for layer in layers], dtype, torch.device("cpu"))
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return kv, Layout(SIZE, Rows(kv, len(windows)))


def slots(seed: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(random.Random(seed).sample(range(SLOTS), SIZE), dtype=np.int32)


@pytest.mark.parametrize("by", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_to_other_slots(dtype: torch.dtype, by: str) -> None:
    """`torch` is how it is done on other devices."""
    kv, layout = made(dtype)
    if by == "torch":
        layout.rows._views = None
    assert layout.rows.widths == ((1 + 3) * 8 * dtype.itemsize, 2 * 8 * dtype.itemsize)
    source, target = slots(1), slots(2)
    before = [tensor[torch.from_numpy(source).long()].clone() for tensor in (*kv.keys, *kv.values)]
    block = layout.copy([source, source])
    assert (
        len(layout.seal(block, PARENT, array("q", KEYS))) == layout.block_bytes == block.data.nbytes + layout.head_bytes
    )
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    for group, start in itertools.product((0, 1), (0, 3)):
        layout.fill(block, group, start, target[start : start + 3 if start == 0 else SIZE])
    after = [tensor[torch.from_numpy(target).long()] for tensor in (*kv.keys, *kv.values)]
    assert all(map(torch.equal, before, after))
    assert all(int((tensor != 0).any(dim=(1, 2)).sum()) == SIZE for tensor in kv.keys)


@pytest.mark.parametrize("first", [0, 5, SIZE])
def test_a_window_that_has_moved_on_leaves_the_first_rows_out(first: int) -> None:
    kv, layout = made()
    gone = slots(3)
    gone[:first] = -1
    block = layout.copy([slots(4), gone])
    assert block.firsts == (0, first)
    again = layout.unseal(layout.seal(block, PARENT, KEYS), PARENT, KEYS)
    assert again is not None
    assert again.firsts == block.firsts
    assert np.array_equal(again.data, block.data)
    target, want = slots(5)[first:], kv.keys[1][torch.from_numpy(gone[first:]).long()].clone()
    layout.fill(again, 1, first, target)
    assert torch.equal(kv.keys[1][torch.from_numpy(target).long()], want)


def test_whatever_is_not_whole_is_refused() -> None:
    _, layout = made()
    sealed = layout.seal(layout.copy([slots(1), slots(2)]), PARENT, KEYS)
    assert layout.unseal(sealed, PARENT, KEYS) is not None
    for length in (0, 1, 17, 30, 60, len(sealed) // 2, len(sealed) - 1):
        assert layout.unseal(sealed[:length], PARENT, KEYS) is None
    assert layout.unseal(sealed + b"\0", PARENT, KEYS) is None
    rng = random.Random(3)
    for _ in range(200):
        at = rng.randrange(len(sealed))
        damaged = bytearray(sealed)
        damaged[at] ^= 1 << rng.randrange(8)
        assert layout.unseal(bytes(damaged), PARENT, KEYS) is None, f"a bit of byte {at} went unnoticed"
    assert layout.unseal(b"\0" * len(sealed), PARENT, KEYS) is None


def test_another_block_is_refused() -> None:
    """Whatever a storage gives under a name, or whatever collides with it: the text before and in it must agree."""
    _, layout = made()
    sealed = layout.seal(layout.copy([slots(1), slots(2)]), PARENT, KEYS)
    other = array("i", [*KEYS[:-1], 99])
    assert layout.unseal(sealed, b"q" * 16, KEYS) is None
    assert layout.unseal(sealed, PARENT, other) is None
    assert layout.unseal(sealed, PARENT, array("q", KEYS)) is None
    assert made(windows=(None,))[1].unseal(sealed, PARENT, KEYS) is None
    assert made(torch.float16)[1].unseal(sealed, PARENT, KEYS) is None
