"""Where an EAGLE head is: a folder, a hub id, or one that comes with this distribution."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from phloem.errors import ModelError

SHIPPED = Path(__file__).with_name("heads")  # a folder for each, named like its target
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")


def locate(name: str, target: tuple[str, ...], shipped: Path = SHIPPED) -> Path:
    """The folder of the head `name`; `auto` is the one that is shipped for a target called so. Raises ModelError.

    Downloads what is on the hub and not here yet.
    """
    if name == "auto":
        return _shipped_for(target, shipped)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    own = {head: path for head, _, path in heads(shipped)}
    if name in own:
        return own[name]
    if _HUB_ID.fullmatch(name) and not folder.is_absolute() and not folder.exists():
        return _download(name)
    told = "it is no folder" if folder.exists() else "no such folder, and no hub id"
    told += f"; shipped are {', '.join(own)}" if own else ""
    raise ModelError(
        f"there is no head '{name}': {told}",
        hint="give a folder with config.json and model.safetensors, or a hub id such as org/name",
    )


def heads(shipped: Path = SHIPPED) -> Iterator[tuple[str, str, Path]]:
    """Name, target and folder of each head that is shipped."""
    for config in sorted(shipped.glob("*/config.json")):
        target = json.loads(config.read_text(encoding="utf-8")).get("target", {})
        yield config.parent.name, str(target.get("name", config.parent.name)), config.parent


def _shipped_for(target: tuple[str, ...], shipped: Path) -> Path:
    """By name: `smollm2-135m` is also meant by HuggingFaceTB/SmolLM2-135M-Instruct and by files that begin so."""
    called = {Path(each).name.lower() for each in target if each}
    known = list(heads(shipped))
    for _, name, path in known:
        begins = re.compile(rf"{re.escape(name.lower())}(?![a-z0-9])")
        if any(begins.match(each) for each in called):
            return path
    told = ", ".join(name for _, name, _ in known) or "none"
    raise ModelError(
        f"no head is shipped for {target[0] if target else 'this model'} (shipped: {told})",
        hint="train one with `phloem train-drafter eagle`, or name one: `{use: eagle, model: FOLDER or org/name}`",
    )


def _download(name: str) -> Path:
    import huggingface_hub

    match = _HUB_ID.fullmatch(name)
    assert match is not None, "it was held to that form"
    try:
        patterns = ["config.json", "*.safetensors", "*.bin"]
        kept = huggingface_hub.snapshot_download(match["repo"], revision=match["revision"], allow_patterns=patterns)
    except Exception as error:  # requests', httpx's or the hub library's own, depending on its version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"there is no folder '{name}', and it could not be downloaded from the Hugging Face hub: {reason}",
            hint="check the id, your network and (for gated repositories) `hf auth login`; or give a folder",
        ) from error
    return Path(kept)
