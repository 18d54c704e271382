"""What model plugins share in describing what they loaded: state groups, and the dtype that `auto` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phloem.errors import ModelError
from phloem.model_spec import GroupSpec

if TYPE_CHECKING:
    import torch


def state_groups(windows: Sequence[int | None]) -> tuple[tuple[GroupSpec, ...], list[int]]:
    """The groups of a model, full attention first and then by window, and each layer's index into them.

    `windows[i]` is the number of tokens layer i sees, None for all.
    """
    distinct = sorted(set(windows), key=lambda window: window or 0)
    groups = tuple(GroupSpec("full") if w is None else GroupSpec("window", "window", w) for w in distinct)
    return groups, [distinct.index(window) for window in windows]


def choose_dtype(asked: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """The dtype to load in. `auto` is float32 on CPUs, elsewhere the one the model was saved in."""
    import torch

    if asked == "auto":
        saved = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        asked = "float32" if device.type == "cpu" else str(saved).removeprefix("torch.")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if asked not in dtypes:
        raise ModelError(f"model.dtype {asked!r} is not one of auto, {', '.join(dtypes)}")
    return dtypes[asked]
