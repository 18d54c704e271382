"""The GGUF container: metadata and tensor table read with plain struct calls, tensors dequantised by the gguf library.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phloem.errors import ModelError

if TYPE_CHECKING:
    from types import ModuleType

# GGUF value type -> struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # before each text
_GROUP_BYTES = 1 << 16  # blocks dequantised at a time: large enough to leave Python, small enough for the cache


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` outermost first (as in torch), `kind` a ggml type number, `start` a file offset."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile:
    """An open GGUF file: `metadata` and `tensors` are read at once, weights when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not GGUF, is damaged, or the gguf extra is not installed."""
        self.path = path
        self._gguf = _import_gguf()
        self._data = _map(path)
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file", hint="it must start with the letters GGUF")
        reader = _Reader(self._data)
        try:
            self.version = reader.scalar("I")
            if self.version not in (2, 3):
                raise ModelError(f"{path} has GGUF version {self.version}; versions 2 and 3 (little-endian) are read")
            tensors, entries = reader.scalar("Q"), reader.scalar("Q")
            self.metadata: dict[str, Any] = {reader.string(): reader.value() for _ in range(entries)}
            self.tensors = self._tensor_table(reader, tensors)
        except (struct.error, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise self._damaged(f"its header cannot be read ({type(error).__name__}: {error})") from error

    def dequantise(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a tensor, float32 in its shape. Block by block, so any grouping gives the same values."""
        kind = self.kind(name)
        try:
            return values_of(kind, self.raw(name)).reshape(self.tensors[name].shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {kind}, which the gguf library cannot dequantise",
                hint="use a file with a common type, such as Q8_0, Q4_K_M or F16",
            ) from error

    def kind(self, name: str) -> str:
        """How a tensor is stored, as ggml calls it: `F32`, `Q4_K`."""
        return str(self._gguf.GGMLQuantizationType(self.tensors[name].kind).name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, [rows, bytes of a row], rows being those of its last dimension; a view of the file."""
        info = self.tensors[name]
        size = self._bytes(name, info.shape, info.kind)
        return np.frombuffer(self._data, np.uint8, size, info.start).reshape(prod(info.shape[:-1]), -1)

    def _tensor_table(self, reader: _Reader, count: int) -> dict[str, TensorInfo]:
        rows = []
        for _ in range(count):
            name = reader.string()
            shape = tuple(reader.scalar("Q") for _ in range(reader.scalar("I")))
            rows.append((name, shape[::-1], reader.scalar("I"), reader.scalar("Q")))
        align = int(self.metadata.get("general.alignment", 32))
        base = (reader.at + align - 1) // align * align
        table = {name: TensorInfo(shape, kind, base + offset) for name, shape, kind, offset in rows}
        for name, info in table.items():
            end = info.start + self._bytes(name, info.shape, info.kind)
            if end > len(self._data):
                missing = f"tensor {name} ends at byte {end:,}, the file at {len(self._data):,}"
                raise self._damaged(f"it is cut short: {missing}")
        return table

    def _bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]
        except ValueError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the unknown ggml type {kind}",
                hint='a newer gguf library may know it: pip install --upgrade "phloem[gguf]"',
            ) from error
        if not all(shape) or (shape or (1,))[-1] % block:
            raise self._damaged(f"tensor {name} has the shape {shape}, which is not made of blocks of {block}")
        return int(prod(shape)) // int(block) * int(size)

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {why}", hint="copy or download the file again")


class _Reader:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("a text runs past the end of the file")
        # llama.cpp does not promise valid UTF-8 in token texts
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """As `string` so often, in a loop of its own: a vocabulary has a hundred thousand, twice a start."""
        data, at, end, length_at = self.data, self.at, len(self.data), _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + length_at(data, at)[0]
            if at > end:
                raise ValueError("a text runs past the end of the file")
            texts.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return texts

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count)
        array = np.frombuffer(self.data, np.dtype("<" + _SCALARS[kind]), count, self.at)
        self.at += array.nbytes
        return array.tolist()


def values_of(kind: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What bytes [rows, bytes of a row] stored as `kind` stand for, [rows, columns]; NotImplementedError if unknown."""
    gguf = _import_gguf()
    number = gguf.GGMLQuantizationType[kind]
    values = gguf.dequantize(_regroup(raw, gguf.GGML_QUANT_SIZES[number][1]), number)
    return np.asarray(values, dtype=np.float32).reshape(len(raw), -1)


def _regroup(raw: npt.NDArray[np.uint8], block: int) -> npt.NDArray[np.uint8]:
    """Reshape whole blocks into long rows: the library works on 16 rows at a time, and model rows are short."""
    blocks = raw.size // block
    wide = max(1, _GROUP_BYTES // block // 16)
    while blocks % wide:
        wide -= 1
    return raw.reshape(-1, wide * block)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="copy or download the file again") from error


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "reading a GGUF file needs the gguf library, which is not installed",
            hint='pip install "phloem[gguf]"',
        ) from error
    module: ModuleType = gguf
    return module
