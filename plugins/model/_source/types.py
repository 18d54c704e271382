"""What a model plugin gets from a name, folder or file: the `ModelSource` contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from phloem.interfaces import TokenizerData

if TYPE_CHECKING:
    import torch

    from phloem.linear import Blocks


class ModelSource(Protocol):
    """An opened model. Opening reads metadata only; weights are read while `tensors` is iterated."""

    path: str  # the folder or GGUF file
    name: str  # what the server calls the model unless told otherwise
    format: str  # "safetensors" or "gguf"
    config: dict[str, Any]  # as in a Hugging Face config.json; built from the metadata of a GGUF file
    eos_token_ids: tuple[int, ...]  # tokens that end an answer

    def tokenizer(self) -> TokenizerData:
        """The tokenizer that comes with the model; raises ModelError if it has none or one that is not understood."""
        ...

    def tensors(self, blocks: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        """Every parameter as (Hugging Face name, tensor), in file order, each once.

        Folders give the dtype of the file, GGUF files dequantised float32, but matrices that are stored in one of the
        kinds named in `blocks` (`Q4_K`) as they are. Tensors may share memory with the file: copy before writing.
        Raises ModelError for a damaged file.
        """
        ...
