"""The shelf: what is copied out while a device is busy, fails or is too small, and how it is told of uses."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phloem import tier_shelf
from phloem.tier_blocks import Block
from phloem.tier_loads import Loads
from phloem.tier_shelf import Shelf

EACH = 100
NAMES = [bytes([number]) * 16 for number in range(8)]
BLOCK = Block((0,), np.zeros(EACH, np.uint8))
POOR = Block((8,), np.zeros(EACH // 2, np.uint8))


class Device:
    """A storage in memory whose writes wait for a gate, or fail."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.touched: list[list[bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def holds(self, name: bytes) -> bool:
        return name in self.kept

    def read(self, name: bytes) -> bytes | None:
        return self.kept.get(name)

    def write(self, name: bytes, data: bytes) -> None:
        self.gate.wait(20)
        if self.fails:
            raise OSError(28, "No space left on device")
        self.kept[name] = data

    def touch(self, names: Sequence[bytes]) -> None:
        self.touched.append([*names])

    def reject(self, name: bytes) -> None:
        del self.kept[name]

    def stats(self) -> dict[str, int]:
        return {"blocks": len(self.kept), "bytes": 0}

    def close(self) -> None:
        pass


def shelf(device: Device | None, host_blocks: int = 0, **more: Any) -> Shelf:
    layout: Any = SimpleNamespace(
        block_bytes=EACH,
        head_bytes=0,
        copy=lambda slots: BLOCK,
        seal=lambda block, parent, keys: b"%d" % block.firsts[0],
        unseal=lambda sealed, parent, keys: POOR if sealed == b"8" else BLOCK,
        poor=lambda block: block.firsts[0] > 0,
    )
    return Shelf(layout, host_blocks * (EACH + 256), device, **more)


def put(made: Shelf, *numbers: int) -> None:
    for number in numbers:
        made.put(NAMES[number], BLOCK, b"", array("i"))


def never(number: int) -> bool:
    """Nothing that is copied has its windows."""
    return False


def written(made: Shelf) -> None:
    """The writer has done all that it was given."""
    done = threading.Event()
    assert made._writer is not None
    made._writer.submit(done.set)
    assert done.wait(20)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.gate.set()


def test_the_last_comes_first_and_what_has_no_place_not_at_all(device: Device) -> None:
    assert shelf(None, 3).lacks(NAMES, 0, never) == [2, 1, 0]
    assert shelf(device).lacks(NAMES, 2, never) == [7, 6, 5, 4, 3, 2]
    made = shelf(device, 3, disk_bytes=5 * EACH + 1)
    assert made.lacks(NAMES, 0, never) == [4, 3, 2, 1, 0]
    put(made, 4, 3, 2, 1, 0)
    assert [name in made._kept for name in NAMES[:5]] == [True, True, True, False, False]


def test_a_device_with_a_backlog_is_given_no_more_than_it_takes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied only to be dropped, and the beginning of a prefix is what is stored of it."""
    monkeypatch.setattr(tier_shelf, "BACKLOG", 2 * EACH)
    device.gate.clear()
    for host_blocks, left in ((0, []), (4, [3, 2])):
        made = shelf(device, host_blocks)
        assert made.lacks(NAMES, 0, never) == [1, 0]
        put(made, 1, 0)
        assert made.lacks(NAMES, 0, never) == left, "what memory lacks"
        assert made.counts["dropped"] == 6 + 6
        put(made, *left)
        assert made._backlog == 2 * EACH
    device.gate.set()
    written(made)
    assert made.lacks(NAMES, 0, never) == [3, 2]


def test_a_state_has_a_place_where_what_comes_before_it_has_one(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one only: in the lowest tier, or in memory while a device is busy."""
    for made in (shelf(None, 1), shelf(device, disk_bytes=4 * EACH + 1)):
        made.layout.state_bytes = 2 * EACH
        made._most = made._most and 4 * EACH + 1
        assert [made.lacks_state(NAMES[7], blocks) for blocks in (1, 2, 3)] == [True, True, False]
        put(made, 7)
        assert not made.lacks_state(NAMES[7], 2)
    monkeypatch.setattr(tier_shelf, "BACKLOG", EACH)
    for host_blocks, wanted in ((0, False), (4, True)):
        made = shelf(device, host_blocks)
        made.layout.state_bytes = 2 * EACH
        assert made.lacks_state(NAMES[6], 1) is wanted
        assert made.counts["dropped"] == 1


def test_a_device_that_fails_to_write_has_a_rest(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made, device.fails = shelf(device), True
    put(made, 0)
    written(made)
    assert made.lacks(NAMES, 0, never) == []
    put(made, 1)
    assert made._backlog == 0
    made._rests_until = time.monotonic()
    device.fails = False
    assert made.lacks(NAMES[:2], 0, never) == [1, 0]
    put(made, 1)
    written(made)
    assert [*device.kept] == [NAMES[1]]


@pytest.mark.parametrize("where", ["memory", "device", "both"])
def test_a_block_without_its_windows_is_replaced_by_one_that_has_them(device: Device, where: str) -> None:
    """Once, in every tier; not by another one that lacks them, and never the other way round."""
    made = shelf(None if where == "memory" else device, 0 if where == "device" else 8)
    steps = [(POOR, b"8", 1), (POOR, b"8", 1), (BLOCK, b"0", 0), (POOR, b"0", 0)]
    for block, there, lacking in steps:
        made.put(NAMES[0], block, b"", array("i"))
        if where != "memory":
            written(made)
            assert device.kept == {NAMES[0]: there}
        if where != "device":
            known = made.get(NAMES[0])
            assert known is not None
            assert known.firsts == ((8,) if there == b"8" else (0,))
            assert made._bytes == known.data.nbytes + 256
        assert made.lacks(NAMES[:1], 0, never) == []
        assert made.lacks(NAMES[:1], 0, lambda number: True) == [0] * lacking
    assert made.copy(NAMES[0], lambda: POOR) is (BLOCK if where != "device" else POOR)


def test_what_an_earlier_life_has_left_is_known_once_it_is_read(device: Device) -> None:
    device.kept[NAMES[0]] = b"8"
    made = shelf(device)
    assert made.lacks(NAMES[:1], 0, lambda number: True) == []
    assert made.read(NAMES[0], b"", array("i")) is POOR
    assert made.lacks(NAMES[:1], 0, lambda number: True) == [0]
    device.fails = True
    put(made, 0)
    written(made)
    made._rests_until = 0.0
    assert device.kept == {NAMES[0]: b"8"}
    assert made.lacks(NAMES[:1], 0, lambda number: True) == [0], "the device still has what it had"


def test_a_storage_that_is_only_read(device: Device) -> None:
    """Whatever else is asked of it; memory goes on."""
    made = shelf(device, 8)
    put(made, 0)
    written(made)
    made.freeze(["a head"])
    made.patient_until = time.monotonic() + 10
    assert made.lacks(NAMES[:3], 0, never) == [2, 1]
    put(made, 2, 1)
    written(made)
    assert [*device.kept] == NAMES[:1]
    assert made.get(NAMES[2]) is BLOCK
    assert made.read(NAMES[0], b"", array("i")) is BLOCK
    assert not made.durable


def test_uses_are_told_together(device: Device) -> None:
    """However long the writer is busy, one task waits for it, and each name comes once, as last used."""
    made = shelf(device)
    device.gate.clear()
    put(made, 7)
    for _ in range(50):
        made.refresh(NAMES[:2])
        made.refresh(NAMES[1:3])
    assert made._writer is not None
    assert made._writer._queue.qsize() <= 2
    device.gate.set()
    written(made)
    assert device.touched == [[NAMES[0], NAMES[2], NAMES[1]]]
    made.refresh(NAMES[:1])
    written(made)
    assert device.touched[1:] == [[NAMES[0]]]


def test_a_window_that_is_gone_is_noticed_before_everything_else_is_looked_at() -> None:
    """A long prefix without windows is refused in time that grows with it, not with its square."""
    looks = []

    class Firsts(tuple[int, ...]):
        def __getitem__(self, group: Any) -> Any:
            looks.append(group)
            return super().__getitem__(group)

    ledger: Any = SimpleNamespace(windows=[None, 4], pools=[0, 0], page_size=1, states=None)
    loads = Loads(ledger, shelf(None), SimpleNamespace(size=8), lambda work: None, lambda work: None)  # type: ignore[arg-type]
    ticket: Any = SimpleNamespace(limit=8 * 200, first=0, blocks=[SimpleNamespace(firsts=Firsts((0, 8)))] * 200)
    assert loads._reach(ticket, 0) == 0
    assert len(looks) <= 2 * 200
    loads.close(0.0)
