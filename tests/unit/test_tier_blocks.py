"""Blocks of KV: copied out of the pools and back, sealed, and unsealed only where they are whole and the right ones."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest
import torch

from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec, StateSpec
from phloem.pool import KVStore
from phloem.states import StateStore
from phloem.tier_blocks import Layout, Rows, state_name

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


def test_only_what_lies_behind_the_last_gap_is_kept() -> None:
    """Of a window any run may be gone."""
    kv, layout = made()
    holes = slots(3)
    holes[[1, 4]] = -1
    block = layout.copy([slots(4), holes])
    assert block.firsts == (0, 5)
    target, want = slots(5)[5:], kv.keys[1][torch.from_numpy(holes[5:]).long()].clone()
    layout.fill(block, 1, 5, target)
    assert torch.equal(kv.keys[1][torch.from_numpy(target).long()], want)


@pytest.mark.parametrize("by", ["numpy", "torch"])
@pytest.mark.parametrize("attends", [True, False])
def test_states_are_entries_of_their_own(attends: bool, by: str) -> None:
    """Beside blocks with rows, or without any: such as of models that do not attend."""
    kv, _ = made(torch.bfloat16, (None,))
    if not attends:
        groups = (GroupSpec("full"), GroupSpec("recurrent", "recurrent"))
        kv = KVStore(ModelSpec("toy", 8, 100, (), groups), [SLOTS], [], torch.float32, torch.device("cpu"))
    states = StateStore([StateSpec(((2, 3), (5,))), StateSpec(((0, 4), (7,)))], 9, torch.device("cpu"))
    for tensor in (one for layer in states.tensors for one in layer):
        tensor.copy_(torch.randn(tensor.shape))
    layout = Layout(SIZE, Rows(kv, 1, states))
    if by == "torch":
        layout.rows._views = None
    assert layout.token_bytes == (6 * 8 * 2 if attends else 0)
    rows, state = layout.copy([slots(1)]), layout.copy_state(3)
    assert (rows.firsts, state.firsts) == ((0, SIZE), (SIZE, SIZE - 1))
    assert (rows.data.nbytes, state.data.nbytes) == (SIZE * layout.token_bytes, (6 + 5 + 7) * 4)
    assert len(layout.seal(state, PARENT, KEYS)) <= layout.state_bytes == state.data.nbytes + layout.head_bytes
    for block in (rows, state):
        again = layout.unseal(layout.seal(block, PARENT, KEYS), PARENT, KEYS)
        assert again is not None
        assert again.firsts == block.firsts
        assert np.array_equal(again.data, block.data)
    want = [tensor[3].clone() for layer in states.tensors for tensor in layer]
    layout.fill(state, 1, SIZE - 1, np.array([6], np.int32))
    assert all(map(torch.equal, (tensor[6] for layer in states.tensors for tensor in layer), want))
    layout.fill(rows, 0, 0, slots(2))
    assert len({state_name(name) for name in (b"a" * 16, b"b" * 16)} | {b"a" * 16}) == 3


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
