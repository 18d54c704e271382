"""Models in one GGUF file, presented as if they were a Hugging Face folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.errors import ModelError
from phloem.interfaces import TokenizerData

from .gguf_config import config_from_gguf, eos_ids
from .gguf_file import GgufFile, values_of
from .gguf_names import IGNORED, expected_shapes, hf_name, to_hf
from .gguf_tokenizer import tokenizer_from_gguf
from .known import served_name
from .progress import Progress

if TYPE_CHECKING:
    import torch

    from phloem.linear import Blocks


class GgufSource:
    """A `ModelSource` over a GGUF file."""

    format = "gguf"

    def __init__(self, path: Path, *, progress: bool = False) -> None:
        """Read the metadata; raises ModelError if the file is damaged, incomplete or of an unknown architecture."""
        self.path, self.name = str(path), served_name(str(path))
        self._progress = progress
        self._file = GgufFile(path)
        with _understood(path):
            self.config = config_from_gguf(self._file)
            self.eos_token_ids = eos_ids(self._file)
        self._arch = str(self._file.metadata["general.architecture"])
        self._names = self._checked_names()

    def tokenizer(self) -> TokenizerData:
        """Built from the file's tokens, merges and scores."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> TokenizerData:
        with _understood(Path(self.path)):
            return tokenizer_from_gguf(self._file)

    def tensors(self, blocks: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        """One tensor at a time: matrices stored in a kind that `blocks` names as they are, the rest in float32.

        The next one is read meanwhile, on a thread: numpy works without the interpreter's lock, as packing does.
        """
        with (
            Progress("Loading weights", total=len(self._names), enabled=self._progress) as bar,
            ThreadPoolExecutor(1, "phloem-read") as reader,
        ):
            ahead: deque[Future[tuple[str, torch.Tensor | Blocks]]] = deque()
            for done, name in enumerate(self._names):
                ahead.append(reader.submit(self._read, name, blocks))
                if done:
                    yield ahead.popleft().result()  # kept by nobody here
                    bar.update(done)
            while ahead:
                yield ahead.popleft().result()
            bar.update(len(self._names))

    def _read(self, name: str, blocks: frozenset[str]) -> tuple[str, torch.Tensor | Blocks]:
        stored = len(self._file.tensors[name].shape) == 2 and self._file.kind(name) in blocks
        return self._names[name], (self._blocks(name) if stored else self._values(name))

    def _values(self, name: str) -> torch.Tensor:
        import torch

        values = to_hf(self._file.dequantise(name), name, self._arch, self.config)
        # F32 tensors come as read-only views of the file
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _blocks(self, name: str) -> Blocks:
        """The order of rows is all that a conversion changes in a matrix, so bytes of rows are moved as values are."""
        import torch

        from phloem.linear import Blocks

        rows = to_hf(self._file.raw(name), name, self._arch, self.config)
        stored = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        return Blocks(((self._file.kind(name), stored),), self._file.tensors[name].shape[1], read_blocks)

    def _checked_names(self) -> dict[str, str]:
        expected = expected_shapes(self.config, self._arch)
        names: dict[str, str] = {}
        for name, info in self._file.tensors.items():
            hf = hf_name(name, self._arch)
            if name in IGNORED:
                continue
            if hf is None or hf not in expected:
                raise ModelError(f"{self.path} has the tensor {name}, which {self._arch} models do not")
            if info.shape != expected[hf]:
                raise ModelError(
                    f"{self.path}: tensor {name} has shape {info.shape}, the metadata implies {expected[hf]}"
                )
            names[name] = hf
        missing = sorted(expected.keys() - names.values())
        if missing:
            some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{self.path} lacks the tensors {some}", hint="copy or download the file again")
        return names


def read_blocks(kind: str, stored: torch.Tensor) -> torch.Tensor:
    """`Blocks.read`: uint8 [rows, bytes of a row] -> float32 [rows, columns]."""
    import torch

    return torch.from_numpy(values_of(kind, stored.numpy()))


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Metadata of the wrong type or size fail in many ways, all of which mean that the file is not what it seems."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelError(
            f"{path} has metadata that make no sense: {type(error).__name__}: {error}",
            hint="copy or download the file again",
        ) from error
