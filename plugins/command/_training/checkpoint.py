"""A head's folder: config.json and model.safetensors, as `spec.eagle` loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phloem.errors import ConfigError

from .corpus import Writing, replace, save
from .head import EagleHead
from .vocabulary import DraftVocabulary

FORMAT, VERSION = "phloem-eagle", 1
FILES = ("config.json", "model.safetensors")


def check_folder(folder: Path) -> None:
    """ConfigError unless a head may be written there: an empty folder, a new one, or that of a head of ours."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"--out {folder}: it is a file", hint="name a folder")
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".part")
    if not names:
        return
    try:
        ours = json.loads((folder / FILES[0]).read_text()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours or set(names) - set(FILES):
        raise ConfigError(
            f"--out {folder}: it holds something else: {', '.join(names[:5])}",
            hint="name a new folder, or an empty one",
        )


def write_head(
    folder: Path,
    head: EagleHead,
    scale: torch.Tensor,
    vocabulary: DraftVocabulary,
    target: Mapping[str, Any],
    training: Mapping[str, Any],
) -> int:
    """Write both files, each at once; returns their bytes. `target` is {"name", "hidden_size", "vocab_size", "depth",
    "layers"}, `scale` [layers * hidden] what features were divided by in training: that becomes part of `fc`.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] / scale.cpu()
    weights = {name: tensor.half() for name, tensor in tensors.items()}
    shape = head.shape
    config = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": "eagle3",
        "target": {name: target[name] for name in ("name", "hidden_size", "vocab_size", "depth")},
        "layers": list(target["layers"]),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "draft_vocab_size": shape.draft_vocab_size,
        "norm_before_residual": False,
        "training": dict(training),
    }
    with Writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / FILES[1], weights | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d})
        replace(folder / FILES[0], (json.dumps(config, indent=1) + "\n").encode())
    return sum((folder / name).stat().st_size for name in FILES)
