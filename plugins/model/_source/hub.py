"""Models on the Hugging Face hub: `org/name`, `org/name@revision`, or `org/name/file.gguf`."""

from __future__ import annotations

import re
import sys

from phloem.errors import ModelError

from .known import KNOWN

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]  # the same weights once more, in their makers' own layouts


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id; says nothing about whether it exists."""
    match = _HUB_ID.fullmatch(name)
    return match is not None and not name.startswith(".") and not match["repo"].endswith((".gguf", ".safetensors"))


def download(name: str, *, progress: bool = False) -> str:
    """The local folder (or GGUF file) of a hub id, downloaded unless the hub's cache has it. Raises ModelError."""
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    match = _HUB_ID.fullmatch(name)
    assert match is not None
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        if match["file"]:
            return huggingface_hub.hf_hub_download(match["repo"], match["file"], revision=match["revision"])
        return huggingface_hub.snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except Exception as error:  # requests', httpx's or the hub library's own, depending on its version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        names = " or ".join(model.name for model in KNOWN)
        raise ModelError(
            f"'{name}' could not be downloaded from the Hugging Face hub: {reason}",
            hint=f"check the id, your network and (for gated models) `hf auth login`; or give the path of a folder or "
            f"GGUF file, or {names}, which come from the Python package index",
        ) from error
