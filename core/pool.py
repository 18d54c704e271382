"""Slots: a free list of pages, the KV tensors they index, and the table that maps a request's tokens to slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .batch import IntArray
from .model_spec import ModelSpec

if TYPE_CHECKING:
    import torch


class SlotPool:
    """Free list over `pages` pages of `page_size` consecutive slots. Slot = page * page_size + offset.

    Owned by the scheduler's thread; nothing here locks. Requests and the cache own whole pages; a page is free or
    has exactly one owner. At page size 1 a page is a slot.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.total = pages * page_size
        self._free: IntArray = np.arange(pages, dtype=np.int32)[::-1].copy()
        self._count = pages

    @property
    def free(self) -> int:
        """Free slots, whole pages only."""
        return self._count * self.page_size

    def alloc(self, slots: int) -> IntArray | None:
        """Take `slots` slots (a multiple of the page size), in page order; None if there are not enough."""
        pages = slots // self.page_size
        assert slots >= 0, f"{slots} slots asked for"
        assert pages * self.page_size == slots, f"{slots} is not a multiple of the page size {self.page_size}"
        if pages > self._count:
            return None
        taken = self._free[self._count - pages : self._count][::-1]
        self._count -= pages
        if self.page_size == 1:
            return taken.copy()
        offsets: IntArray = np.arange(self.page_size, dtype=np.int32)
        spread: IntArray = np.add.outer(taken * np.int32(self.page_size), offsets)
        return spread.reshape(-1)

    def release(self, slots: IntArray) -> None:
        """Give back slots; with pages above 1 they must be whole pages, in page order."""
        if not len(slots):
            return
        pages = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        whole = len(pages) * self.page_size == len(slots) and not (slots[:: self.page_size] % self.page_size).any()
        assert whole, "only whole pages can be released"
        end = self._count + len(pages)
        assert end <= len(self._free), "more slots released than exist: a double free"
        self._free[self._count : end] = pages[::-1]  # so that the next alloc gives them in order again
        self._count = end

    def free_set(self) -> set[int]:
        """The free pages, for `check()` and tests."""
        return {int(page) for page in self._free[: self._count]}


class KVStore:
    """K and V of every layer: `keys[i]` is [slots, kv_heads, k_dim], `values[i]` is [slots, kv_heads, v_dim]."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: Sequence[int],
        group_of: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        scratch: Mapping[int, int] | None = None,
    ) -> None:
        """`slots[g]` slots for pool group g; layer i's KV lies in pool group `group_of[i]`.

        `scratch` has more rows for some layers, behind those of the slots.
        """
        import torch

        self.group_of = tuple(group_of)  # layer -> index into Batch.groups

        def zeros(slots: int, heads: int, dim: int) -> torch.Tensor:
            # Zeros, not empty: a padded gather may read a slot nobody wrote, and 0 * NaN would poison the result.
            # On CPU through numpy, whose zeros are mapped lazily: a large pool costs no start-up time.
            if device.type != "cpu" or not dim:
                return torch.zeros(slots, heads, dim, dtype=dtype, device=device)
            raw = np.zeros(slots * heads * dim * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(raw).view(dtype).view(slots, heads, dim)

        more = scratch or {}
        sizes = [
            (slots[g] + more.get(i, 0), layer) for i, (g, layer) in enumerate(zip(group_of, spec.layers, strict=True))
        ]
        self.keys = [zeros(n, s.kv_heads, s.k_dim) for n, s in sizes]
        self.values = [zeros(n, s.kv_heads, s.v_dim) for n, s in sizes]
        self.moved_bytes = 0
        self.marks: tuple[str, ...] = ()  # what rows depend on that are neither K nor V of the model
        self.lost: Mapping[str, str] = {}  # whose such rows are not all there any more, and why

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] of one layer at `slots` [T] int64."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def move(self, source: IntArray, target: IntArray, group: int) -> None:
        """Copy slots `source` to `target` in a group's layers: only for draft branches at page sizes above 1."""
        import torch

        src, dst = torch.from_numpy(source.astype(np.int64)), torch.from_numpy(target.astype(np.int64))
        for layer, of in enumerate(self.group_of):
            for tensor in (self.keys[layer], self.values[layer]) if of == group else ():
                rows = tensor[src.to(tensor.device)]
                tensor[dst.to(tensor.device)] = rows
                self.moved_bytes += rows.numel() * rows.element_size()


class SlotTable:
    """Map from a running request's row and token index to its slot: `slots[g]` is [rows, context] for group g.

    Batch building reads it with one vectorised gather instead of walking requests.
    """

    def __init__(self, groups: int, rows: int, context: int) -> None:
        self.slots = [np.zeros((rows, context), dtype=np.int32) for _ in range(groups)]
        self._free = list(range(rows))[::-1]

    @property
    def free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def take(self) -> int:
        """A row for a request that starts running."""
        return self._free.pop()

    def give(self, row: int) -> None:
        """Return a row."""
        self._free.append(row)
