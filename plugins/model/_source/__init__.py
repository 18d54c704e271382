"""From what a user calls a model to something a model plugin can load: `resolve`, then `open_source`."""

from __future__ import annotations

from pathlib import Path

from phloem.errors import ModelError

from .folder import FolderSource
from .gguf import GgufSource
from .known import KNOWN, served_name
from .resolve import resolve
from .types import ModelSource

__all__ = ["KNOWN", "FolderSource", "GgufSource", "ModelSource", "open_source", "resolve", "served_name"]


def open_source(path: str, *, progress: bool = False) -> ModelSource:
    """Open a folder or GGUF file, as given by `resolve`; metadata only. Raises ModelError.

    Called once per load, and once more by each model plugin that is asked whether it supports the model.
    """
    where = Path(path)
    if where.is_dir():
        return FolderSource(where, progress=progress)
    if where.is_file():
        return GgufSource(where, progress=progress)
    raise ModelError(f"{path} is neither a folder nor a file", hint="give a folder with config.json, or a .gguf file")
