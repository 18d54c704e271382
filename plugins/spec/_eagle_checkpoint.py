"""Reads an EAGLE head from its folder: our own layout, SpecForge's, that of `speculators`, and the first EAGLE's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from phloem.errors import ModelError
from phloem.model_spec import ModelSpec

from ._eagle_shape import Shape, check_target, read_shape

# What stands before the names of the one layer's tensors, and what the fusing layer is called.
_PREFIXES = {"midlayer.": "", "layers.0.": "", "transformer.": "", "fusion_fc.": "fc."}
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Checkpoint:
    """A head as read: float tensors in the dtype they are stored in, named without the layer's prefix."""

    folder: Path
    shape: Shape
    tensors: Mapping[str, torch.Tensor]
    tokens: torch.Tensor  # [shape.vocab] int64: the target's ids of the tokens that it can propose

    @cached_property
    def fingerprint(self) -> str:
        """A hash over all that its entries depend on; reads the tensors once."""
        whole = hashlib.sha256(repr(self.shape).encode())
        for name in sorted(self.tensors):
            whole.update(name.encode())
            whole.update(self.tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    def to(self, device: torch.device, dtype: torch.dtype) -> Checkpoint:
        """The same in another dtype, on a device."""
        return replace(self, tensors={name: tensor.to(device, dtype) for name, tensor in self.tensors.items()})


def read_checkpoint(folder: Path, model: ModelSpec) -> Checkpoint:
    """The head in a folder, held to the target. Raises ModelError saying what does not fit, and by how much."""
    config = _config(folder)
    tensors = {_name(name): tensor for name, tensor in _tensors(folder).items()}
    query, output = tensors.get("self_attn.q_proj.weight"), tensors.get("self_attn.o_proj.weight")
    if query is None or output is None or query.ndim != 2 or output.ndim != 2:
        raise ModelError(
            "it has no midlayer.self_attn.q_proj.weight and o_proj.weight, nor layers.0's: it is no EAGLE head",
            hint="name a folder with a head that SpecForge, speculators or `phloem train-drafter eagle` has written",
        )
    shape = read_shape(config, query.shape[1] == 2 * output.shape[0], model)
    check_target(config, shape, model)
    tokens = _tokens(tensors.pop("d2t", None), tensors.pop("t2d", None), shape, model)
    if shape.algorithm == "eagle":
        tensors.pop("lm_head.weight", None)  # a copy of the target's, which is used in its place
    _check_tensors(tensors, shape, model)
    return Checkpoint(folder, shape, tensors, tokens)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError("its config.json is no object")
    return config


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ModelError("it has no *.safetensors and no *.bin")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            read: Any = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            found.update(read)
        except Exception as error:  # safetensors', pickle's or the zip reader's own
            raise ModelError(f"{file.name} cannot be read: {str(error).splitlines()[0]}") from error
    return found


def _name(name: str) -> str:
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _tokens(offsets: torch.Tensor | None, known: torch.Tensor | None, shape: Shape, model: ModelSpec) -> torch.Tensor:
    """The target's ids, token by token of the draft vocabulary; `offsets` (d2t) are what each is beyond its own."""
    ids = torch.arange(shape.vocab)
    if offsets is not None and shape.algorithm == "eagle3":
        if offsets.shape != ids.shape:
            raise ModelError(f"d2t has {offsets.numel():,} entries for a draft vocabulary of {shape.vocab:,}")
        ids = ids + offsets.to(torch.int64)
    elif shape.vocab != model.vocab_size:
        raise ModelError(f"it proposes {shape.vocab:,} of {model.vocab_size:,} tokens, and no d2t says which")
    low, high, different = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
    if low < 0 or high >= model.vocab_size or different < len(ids):
        told = f"tokens {low} to {high}, {different:,} different ones"
        raise ModelError(
            f"its d2t means {told}, of a vocabulary of {model.vocab_size:,}: each must be another one of it"
        )
    if known is not None and shape.algorithm == "eagle3":
        mine = known.nonzero().flatten() if known.dtype == torch.bool else None
        if mine is not None and not torch.equal(mine, ids.sort().values):
            raise ModelError(f"its t2d marks {len(mine):,} tokens, and they are not those of d2t")
    return ids


def _check_tensors(tensors: Mapping[str, torch.Tensor], shape: Shape, model: ModelSpec) -> None:
    """Each tensor is there, has its shape and is finite, and there is no other."""
    needed, optional = _shapes(shape, model)
    problems = [f"{name} is missing" for name in needed if name not in tensors]
    for name, tensor in tensors.items():
        wanted = needed.get(name) or optional.get(name)
        if wanted is None:
            problems.append(f"{name} is nothing that this reader knows")
        elif tuple(tensor.shape) != wanted:
            problems.append(f"{name} is {_times(tensor.shape)}, not {_times(wanted)}")
        elif not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            problems.append(f"{name} is not of finite numbers")
    if problems:
        rest = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ModelError(f"{'; '.join(problems[:4])}{rest}")


def _shapes(shape: Shape, model: ModelSpec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """By name the tensors that must be there, and those that may."""
    h, wide = shape.hidden, shape.algorithm == "eagle3"
    q, kv, entry = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, 2 * h if wide else h
    outputs = dict(zip((*_PROJECTIONS, *_MLP), (q, kv, kv, h, shape.intermediate, shape.intermediate, h), strict=True))
    inputs = dict(zip((*_PROJECTIONS, *_MLP), (entry, entry, entry, q, h, h, shape.intermediate), strict=True))
    needed: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, inputs[name]) for name, out in outputs.items()}
    needed["fc.weight"] = (h, len(shape.layers) * model.hidden_size if wide else 2 * h)
    needed["post_attention_layernorm.weight"] = (h,)
    optional: dict[str, tuple[int, ...]] = {f"{name}.bias": (out,) for name, out in outputs.items()}
    optional |= {"fc.bias": (h,), "embed_tokens.weight": (model.vocab_size, h)}
    if wide:
        needed |= {f"{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm", "norm")}
        needed["lm_head.weight"] = (shape.vocab, h)
    else:
        optional["input_layernorm.weight"] = (h,)
    return needed, optional


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
