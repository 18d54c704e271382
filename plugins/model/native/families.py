"""How the supported model families differ: one row of data each. The names are those of config.json's model_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .lfm2 import LFM2_NAMES, lfm2_config
from .mamba2 import MAMBA2_NAMES, mamba2_config


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's code fixes, beyond what its config says. Attributes hold for every layer."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config keys that a config.json may leave out
    biases: Mapping[str, str | bool] = field(default_factory=dict)  # projection -> config key that switches its bias
    qk_norm: bool = False  # RMS norm of every query and key head before the rotation
    sandwich: bool = False  # norms after attention and after the MLP as well, inside the residual
    norm_offset: float = 0.0  # added to norm weights, which are stored around zero
    scale_embedding: bool = False  # embeddings times sqrt(hidden size)
    kinds: frozenset[str] = frozenset({"full_attention", "sliding_attention"})  # of layers
    root: str = "model"  # what all tensors but the head's are named below
    names: Mapping[str, str] = field(default_factory=dict)  # Llama's names of blocks and tensors -> this family's
    reads: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # its config in Llama's spelling


_ATTENTION_BIAS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_bias")
_MLP_BIAS = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias")
_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "head_dim": None}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults={**_COMMON, "num_key_value_heads": None, "hidden_act": "silu"},
        biases={**_ATTENTION_BIAS, **_MLP_BIAS},
    ),
    "mistral": Family(defaults={**_COMMON, "hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(
        defaults={
            **_COMMON,
            "hidden_act": "silu",
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        biases={"q_proj": True, "k_proj": True, "v_proj": True},
    ),
    "qwen3": Family(
        defaults={
            **_COMMON,
            "hidden_act": "silu",
            "head_dim": 128,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        biases=_ATTENTION_BIAS,
        qk_norm=True,
    ),
    "gemma3_text": Family(
        defaults={
            **_COMMON,
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        biases=_ATTENTION_BIAS,
        qk_norm=True,
        sandwich=True,
        norm_offset=1.0,
        scale_embedding=True,
    ),
    "lfm2": Family(
        defaults={**_COMMON, "hidden_act": "silu", "rope_theta": 1000000.0, "conv_L_cache": 3, "conv_bias": False},
        qk_norm=True,
        kinds=frozenset({"full_attention", "conv"}),
        names=LFM2_NAMES,
        reads=lfm2_config,
    ),
    "mamba2": Family(
        defaults={**_COMMON, "hidden_act": "silu"},
        kinds=frozenset({"mamba2"}),
        root="backbone",
        names=MAMBA2_NAMES,
        reads=mamba2_config,
    ),
}
