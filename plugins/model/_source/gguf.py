"""Models in one GGUF file, presented as if they were a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.errors import ModelError
from phloem.interfaces import TokenizerData

from .gguf_config import config_from_gguf, eos_ids
from .gguf_file import GgufFile
from .gguf_names import IGNORED, expected_shapes, hf_name, to_hf
from .gguf_tokenizer import tokenizer_from_gguf
from .known import served_name
from .progress import Progress

if TYPE_CHECKING:
    import torch


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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, dequantised to float32, one at a time."""
        import torch

        with Progress("Loading weights", total=len(self._names), enabled=self._progress) as bar:
            for done, (name, hf) in enumerate(self._names.items(), start=1):
                values = to_hf(self._file.dequantise(name), name, self._arch, self.config)
                # F32 tensors come as read-only views of the file
                yield hf, torch.from_numpy(values if values.flags.writeable else values.copy())
                bar.update(done)

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
