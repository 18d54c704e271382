"""A Hugging Face config dict, read into what the layers need. Whatever cannot be served exactly is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phloem.errors import ModelError

from .families import FAMILIES, Family
from .mamba2 import Ssm, ssm_of, ssm_problem
from .rope import Rope, rope_problem

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class LayerArch:
    """What may differ from layer to layer: the window (tokens seen, the current one included) and the rotation.

    With a `kernel` it is a short convolution over so many inputs in the place of attention, with `ssm` a recurrence.
    """

    window: int | None
    rope: Rope | None
    kernel: int | None = None
    ssm: Ssm | None = None


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder of one of the families, in numbers."""

    model_type: str
    family: Family
    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    activation: str
    scale: float  # of attention scores
    logit_softcap: float | None
    tied: bool
    biases: frozenset[str]  # projections with a bias
    conv_bias: bool
    layers: tuple[LayerArch, ...]


def read_arch(config: Mapping[str, Any]) -> Arch:
    """The architecture in a config.json's dict; raises ModelError saying what is missing or not supported."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelError(f"model type {model_type!r} is not one of {', '.join(FAMILIES)}")
    values = {**family.defaults, **family.reads(config)}
    heads = _integer(values, "num_attention_heads")
    kv_heads = _integer(values, "num_key_value_heads", heads)
    hidden = _integer(values, "hidden_size")
    head_dim = _integer(values, "head_dim", hidden // heads)
    activation = values.get("hidden_activation") or values.get("hidden_act")
    problem = _problem(values, activation, heads, kv_heads, head_dim)
    if problem:
        raise ModelError(f"{model_type}: {problem}")
    scalar = values.get("query_pre_attn_scalar") or head_dim
    return Arch(
        model_type=model_type,
        family=family,
        vocab_size=_integer(values, "vocab_size"),
        hidden=hidden,
        intermediate=_integer(values, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_integer(values, "max_position_embeddings"),
        norm_eps=float(values["rms_norm_eps"]),
        activation=str(activation),
        scale=float(scalar) ** -0.5,
        logit_softcap=values.get("final_logit_softcapping"),
        tied=bool(values["tie_word_embeddings"]),
        biases=frozenset(name for name, on in family.biases.items() if (on if on is True else values.get(str(on)))),
        conv_bias=bool(values.get("conv_bias")),
        layers=_layers(values, family),
    )


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, expected a positive integer")
    return value


def _problem(values: Mapping[str, Any], activation: Any, heads: int, kv_heads: int, head_dim: int) -> str | None:
    if activation not in ACTIVATIONS:
        return f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if heads % kv_heads:
        return f"{heads} query heads cannot share {kv_heads} KV heads evenly"
    if head_dim % 2:
        return f"head_dim {head_dim} is odd and cannot be rotated"
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        return f"weights quantised with {method!r} cannot be read"
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if values.get(key):
            return f"{key} is not supported"
    return None


def _layers(values: Mapping[str, Any], family: Family) -> tuple[LayerArch, ...]:
    """Windows and rotations of all layers: explicit `layer_types`, or the family's older notations."""
    count = _integer(values, "num_hidden_layers")
    types = values.get("layer_types") or _layer_types(values, count)
    if len(types) != count or not family.kinds.issuperset(types):
        known = " or ".join(sorted(family.kinds))
        raise ModelError(f"config.json: layer_types {types!r} does not name {known} {count} times")
    ropes = {kind: _rope(values, kind) if kind.endswith("attention") else None for kind in sorted(set(types))}
    window = _integer(values, "sliding_window") if "sliding_attention" in types else None
    kernel = _integer(values, "conv_L_cache") if "conv" in types else None
    ssm = _ssm(values) if "mamba2" in types else None
    return tuple(
        LayerArch(window if kind == "sliding_attention" else None, ropes[kind], kernel if kind == "conv" else None, ssm)
        for kind in types
    )


def _ssm(values: Mapping[str, Any]) -> Ssm:
    for key in ("n_groups", "state_size", "conv_kernel"):
        _integer(values, key)
    problem = ssm_problem(values)
    if problem:
        raise ModelError(f"{values['model_type']}: {problem}")
    return ssm_of(values)


def _layer_types(values: Mapping[str, Any], count: int) -> list[str]:
    full, sliding = "full_attention", "sliding_attention"
    window = values.get("sliding_window") if values["model_type"] != "llama" else None
    if window is None or values.get("use_sliding_window") is False:
        return [full] * count
    if "sliding_window_pattern" in values:  # Gemma 3: every n-th layer sees everything
        pattern = _integer(values, "sliding_window_pattern")
        return [full if (i + 1) % pattern == 0 else sliding for i in range(count)]
    first = values.get("max_window_layers", 0)  # Qwen: only the layers from here on
    return [sliding if i >= first else full for i in range(count)]


def _rope(values: Mapping[str, Any], kind: str) -> Rope:
    """The rotation of one kind of layer: `rope_parameters` (per kind or for all), or `rope_theta` + `rope_scaling`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    nested = kind in parameters or "full_attention" in parameters
    if nested:
        parameters = parameters.get(kind) or {}
    theta = values["rope_theta"]
    if kind == "sliding_attention" and "rope_local_base_freq" in values:
        theta = values["rope_local_base_freq"]
        parameters = parameters if nested else {}  # the scaling of older Gemma configs is meant for full attention
    merged = {"rope_theta": theta, "partial_rotary_factor": values.get("partial_rotary_factor", 1.0), **parameters}
    merged["rope_type"] = merged.get("rope_type") or merged.pop("type", None) or "default"
    merged.setdefault("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    if merged["original_max_position_embeddings"] is None:
        merged["original_max_position_embeddings"] = values["max_position_embeddings"]
    merged["max_position_embeddings"] = values["max_position_embeddings"]
    problem = rope_problem(merged)
    if problem:
        raise ModelError(f"{values['model_type']}: {problem}")
    return Rope(tuple(sorted((k, v) for k, v in merged.items() if isinstance(v, (int, float, str)))))
