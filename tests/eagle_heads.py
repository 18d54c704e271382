"""Random EAGLE heads for tiny models, written to folders in each of the layouts that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def config_of(target: Path, **changes: Any) -> dict[str, Any]:
    """Our own config.json of a small EAGLE-3 head for a tiny model."""
    theirs = json.loads((target / "config.json").read_text())
    hidden, depth = theirs["hidden_size"], theirs["num_hidden_layers"]
    return {
        "format": "phloem-eagle",
        "version": 1,
        "algorithm": "eagle3",
        "target": {
            "name": target.name, "hidden_size": hidden, "vocab_size": theirs["vocab_size"], "depth": depth,
        },
        "layers": [1, 2, depth],
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "draft_vocab_size": 200,
        "norm_before_residual": False,
    } | changes  # fmt: skip


def tensors_of(config: dict[str, Any], seed: int = 7, spread: float = 0.15) -> dict[str, torch.Tensor]:
    """Random weights, named as SpecForge does; norms are random too, so that a forgotten one shows."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * spread

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    h, wide, width = config["hidden_size"], config["algorithm"] == "eagle3", config["head_dim"]
    q, kv, entry = config["num_attention_heads"] * width, config["num_key_value_heads"] * width, 2 * h if wide else h
    made = {
        "fc.weight": matrix(h, (len(config["layers"]) if wide else 2) * h),
        "midlayer.self_attn.q_proj.weight": matrix(q, entry),
        "midlayer.self_attn.k_proj.weight": matrix(kv, entry),
        "midlayer.self_attn.v_proj.weight": matrix(kv, entry),
        "midlayer.self_attn.o_proj.weight": matrix(h, q),
        "midlayer.mlp.gate_proj.weight": matrix(config["intermediate_size"], h),
        "midlayer.mlp.up_proj.weight": matrix(config["intermediate_size"], h),
        "midlayer.mlp.down_proj.weight": matrix(h, config["intermediate_size"]),
        "midlayer.post_attention_layernorm.weight": norm(h),
    }
    if not wide:
        return made | {"fc.bias": torch.randn(h, generator=random) * spread}
    made |= {"midlayer.input_layernorm.weight": norm(h), "midlayer.hidden_norm.weight": norm(h), "norm.weight": norm(h)}
    size, vocab = config["draft_vocab_size"], config["target"]["vocab_size"]
    ids = torch.randperm(vocab, generator=random)[:size].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    made["lm_head.weight"] = matrix(size, h) * 3
    return made | {"d2t": ids - torch.arange(size), "t2d": known}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A head in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_head(folder: Path, target: Path, seed: int = 7, **changes: Any) -> Path:
    """A random head for a tiny model, in our own layout."""
    config = config_of(target, **changes)
    return write_head(folder, config, tensors_of(config, seed))


def read_head(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a head that was written."""
    from safetensors.torch import load_file

    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def as_specforge(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same head as SpecForge writes it: layers are named by what they give, one less than ours."""
    flat = {
        key: value for key, value in config.items() if key not in ("format", "version", "algorithm", "target", "layers")
    }
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": config["target"]["vocab_size"],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config["layers"]],
        },
    }
    return flat, tensors


def as_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same head as `speculators` writes it."""
    inner = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    wide = config["algorithm"] == "eagle3"
    told = {
        "speculators_model_type": config["algorithm"],
        "architectures": ["Eagle3Speculator" if wide else "EagleSpeculator"],
        "transformer_layer_config": {
            **{key: config[key] for key in (*inner, "rms_norm_eps")},
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": config["target"]["vocab_size"],
        },
        "norm_before_residual": config["norm_before_residual"],
    }
    if wide:
        told |= {"draft_vocab_size": config["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": config["layers"]}
    layer, fuse = ("layers.0.", "fc.") if wide else ("transformer.", "fusion_fc.")
    return told, {
        name.replace("midlayer.", layer).replace("fc.", fuse) if name.startswith(("midlayer.", "fc.")) else name: tensor
        for name, tensor in tensors.items()
    }


def as_first_eagle(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An EAGLE-1 head as its authors wrote it: a Llama config, one layer, and no word of what it is."""
    assert config["algorithm"] == "eagle", "the first one"
    flat = {
        key: value for key, value in config.items() if key not in ("format", "version", "algorithm", "target", "layers")
    }
    flat |= {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": config["target"]["vocab_size"],
    }
    del flat["draft_vocab_size"]
    return flat, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
