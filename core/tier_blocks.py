"""Blocks of KV outside of the pools: how their rows lie, how they are copied, and how they are written down.

A block is a run of whole pages of one prefix, named by a hash over everything before and in it (`phloem.events.chain`).
Of recurrent layers the state after a block's last token is kept beside it, under a name of its own (`state_name`): it
may come later than the rows, and a load needs one only, at its end.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .batch import IntArray

if TYPE_CHECKING:
    import torch

    from .pool import KVStore
    from .states import StateStore

FORMAT = 1  # of `seal`; a store with another one is foreign
Bytes = npt.NDArray[np.uint8]
_MAGIC = b"phloemKV"
_FIXED = struct.Struct("<8sIHI")  # magic, checksum of the rest, groups, bytes of keys
_PARENT_BYTES = 16


def state_name(name: bytes) -> bytes:
    """What the state after the block of this name is kept under: 16 bytes."""
    return hashlib.blake2b(name, digest_size=_PARENT_BYTES, person=b"phloem state").digest()


@dataclass(frozen=True, slots=True)
class Block:
    """The KV of one block's tokens, as far as it was there: of group g that of rows firsts[g] on.

    `data` holds group after group; of each, K and V of layer after layer, [rows, bytes of a row]. The group of
    recurrent layers is the last; a state counts as the row of the block's last token, and is all that its entry has.
    """

    firsts: tuple[int, ...]
    data: Bytes


class Rows:
    """The stores as raw rows: group g has `widths[g]` bytes per slot, over all of its layers' K and V.

    Behind the `groups` whose slots are tokens' comes that of states, if there is one. On a CPU numpy copies, which
    leaves torch's threads alone whatever thread it runs on: 64 tokens of a model with 46 KB a token take about a
    millisecond either way.
    """

    def __init__(self, kv: KVStore, groups: int, states: StateStore | None = None) -> None:
        self.groups = groups
        made: list[list[torch.Tensor]] = [[] for _ in range(groups)]
        for layer, group in enumerate(kv.group_of):
            made[group] += [kv.keys[layer], kv.values[layer]]
        if states is not None:
            made.append([tensor for layer in states.tensors for tensor in layer])
        self._tensors = [[tensor for tensor in own if tensor[:1].numel()] for own in made]
        self._each = [[t[:1].numel() * t.element_size() for t in tensors] for tensors in self._tensors]
        self.widths = tuple(map(sum, self._each))
        self._views: list[list[Bytes]] | None = None
        if all(tensor.device.type == "cpu" for tensors in self._tensors for tensor in tensors):
            import torch

            self._views = [[t.view(torch.uint8).flatten(1).numpy() for t in tensors] for tensors in self._tensors]

    def read(self, group: int, slots: IntArray) -> Bytes:
        """The rows of some slots, as in `Block.data`."""
        if self._views is None and self._tensors[group]:
            import torch

            index = torch.from_numpy(slots.astype(np.int64)).to(self._tensors[group][0].device)
            rows = [tensor[index].flatten().view(torch.uint8) for tensor in self._tensors[group]]
            copied: Bytes = torch.cat(rows).cpu().numpy()
            return copied
        out: Bytes = np.empty(len(slots) * self.widths[group], dtype=np.uint8)
        for i, part in enumerate(self._parts(out, group, len(slots))):
            assert self._views is not None
            np.take(self._views[group][i], slots, axis=0, out=part, mode="clip")  # "raise" would copy twice
        return out

    def write(self, group: int, slots: IntArray, data: Bytes, rows: int, start: int) -> None:
        """Copy rows [start, start + len(slots)) of a group's part of a block, which has `rows`, to slots."""
        for i, part in enumerate(self._parts(data, group, rows)):
            wanted = part[start : start + len(slots)]
            if self._views is not None:
                self._views[group][i][slots] = wanted
            else:
                import torch

                tensor = self._tensors[group][i]
                moved = torch.from_numpy(wanted.copy()).to(tensor.device).view(tensor.dtype)
                index = torch.from_numpy(slots.astype(np.int64)).to(tensor.device)
                tensor[index] = moved.view(len(slots), *tensor.shape[1:])

    def _parts(self, data: Bytes, group: int, rows: int) -> list[Bytes]:
        """A group's bytes as [rows, width] for each K and V."""
        each = self._each[group]
        if not each:  # a group without layers: its slots only count tokens
            return []
        parts = np.split(data, np.cumsum([rows * width for width in each])[:-1])
        return [part.reshape(rows, width) for part, width in zip(parts, each, strict=True)]


@dataclass(frozen=True, slots=True)
class Layout:
    """What is the same for all blocks of an engine."""

    size: int  # tokens of a block, whole pages
    rows: Rows
    needs: tuple[int, ...] = ()  # per group of tokens: the first row that a text needs which ends with the block

    @property
    def head_bytes(self) -> int:
        """Most bytes that `seal` adds to a block."""
        return _FIXED.size + 4 * len(self.rows.widths) + _PARENT_BYTES + 8 * self.size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows."""
        return sum(self.rows.widths[: self.rows.groups])

    @property
    def block_bytes(self) -> int:
        """Most bytes of one block's rows, sealed."""
        return self.size * self.token_bytes + self.head_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, sealed; 0 where no layer keeps one."""
        width = sum(self.rows.widths[self.rows.groups :])
        return width and width + self.head_bytes

    def poor(self, block: Block) -> bool:
        """It lacks rows of windows that a text needs which ends with it; a state never does."""
        groups = len(self.needs)
        lacks = any(first > need for first, need in zip(block.firsts, self.needs, strict=False))
        return lacks and block.firsts[groups:] != (self.size - 1,)

    def complete(self, slots: Sequence[IntArray]) -> bool:
        """What `copy` would make of these is not poor."""
        return not any((own[need:] < 0).any() for own, need in zip(slots, self.needs, strict=False))

    def copy(self, slots: Sequence[IntArray]) -> Block:
        """A block out of the pools: per group of tokens [size] slots; what lies before a -1 is not kept."""
        gone = [np.flatnonzero(own < 0) for own in slots]
        firsts = [int(holes[-1]) + 1 if len(holes) else 0 for holes in gone]
        data = [self.rows.read(g, own[first:]) for g, (own, first) in enumerate(zip(slots, firsts, strict=True))]
        firsts += [self.size] * (len(self.rows.widths) - self.rows.groups)
        return Block(tuple(firsts), data[0] if len(data) == 1 else np.concatenate(data))

    def copy_state(self, slot: int) -> Block:
        """A state out of the pools, as an entry of its own."""
        group = self.rows.groups
        return Block((*[self.size] * group, self.size - 1), self.rows.read(group, np.array([slot], np.int32)))

    def fill(self, block: Block, group: int, start: int, slots: IntArray) -> None:
        """Copy rows [start, start + len(slots)) of a block, which has them, to slots of a group."""
        at = 0
        for before in range(group):
            at += (self.size - block.firsts[before]) * self.rows.widths[before]
        rows = self.size - block.firsts[group]
        part = block.data[at : at + rows * self.rows.widths[group]]
        self.rows.write(group, slots, part, rows, start - block.firsts[group])

    def seal(self, block: Block, parent: bytes, keys: array[int]) -> bytes:
        """A block as bytes that say what they are, and show whether they are whole."""
        text = keys.tobytes()
        firsts = struct.pack(f"<{len(block.firsts)}I", *block.firsts)
        rest = b"".join((firsts, parent, text, block.data.data))
        return _FIXED.pack(_MAGIC, zlib.crc32(rest), len(block.firsts), len(text)) + rest

    def unseal(self, sealed: bytes, parent: bytes, keys: array[int]) -> Block | None:
        """The block of these keys after this parent; None if that is not what the bytes hold, in whole."""
        text = keys.tobytes()
        groups = len(self.rows.widths)
        head = struct.Struct(f"<{groups}I{_PARENT_BYTES}s{len(text)}s")
        view = memoryview(sealed)[_FIXED.size :]
        if len(view) < head.size:
            return None
        magic, checksum, *sizes = _FIXED.unpack_from(sealed)
        if (magic, *sizes) != (_MAGIC, groups, len(text)) or zlib.crc32(view) != checksum:
            return None
        *firsts, their_parent, their_text = head.unpack_from(view)
        data: Bytes = np.frombuffer(view[head.size :], dtype=np.uint8)
        want = sum((self.size - first) * width for first, width in zip(firsts, self.rows.widths, strict=True))
        same = (their_parent, their_text) == (parent, text) and max(firsts) <= self.size and len(data) == want
        return Block(tuple(firsts), data) if same else None
