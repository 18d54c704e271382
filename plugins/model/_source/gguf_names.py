"""llama.cpp's tensor names and layouts to Hugging Face's, for the architectures of gguf_config."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Values = TypeVar("Values", bound=npt.NDArray[Any])  # of floats, or bytes of stored rows

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
IGNORED = frozenset({"rope_freqs.weight"})  # read into the config


def hf_name(name: str, arch: str) -> str | None:
    """Hugging Face's name of a tensor, None if the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    part = (_GEMMA_PARTS if arch.startswith("gemma") else _PARTS).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else None


def to_hf(values: Values, name: str, arch: str, config: dict[str, Any]) -> Values:
    """Undo what llama.cpp's conversion did to the values of tensor `name`."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return cast(Values, values - np.float32(1.0))  # stored as the factor 1 + w that the norm multiplies by
    if arch == "llama" and ".attn_q." in name:
        return _halves(values, config["num_attention_heads"])
    if arch == "llama" and ".attn_k." in name:
        return _halves(values, config["num_key_value_heads"])
    return values


def _halves(values: Values, heads: int) -> Values:
    """From rotary pairs side by side (2i, 2i+1) to pairs half a head apart (i, i + d/2), along the output rows."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return cast(Values, np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape))


def expected_shapes(config: dict[str, Any], arch: str) -> dict[str, tuple[int, ...]]:
    """Names (Hugging Face's) and shapes of all parameters of a model with this config."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if arch.startswith("gemma"):
        layer |= {f"{part}_feedforward_layernorm.weight": (hidden,) for part in ("pre", "post")}
    if arch in ("qwen3", "gemma3"):
        layer |= {f"self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    if arch == "qwen2" or config.get("attention_bias"):
        layer |= {f"self_attn.{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"}
    if config.get("attention_bias"):
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.get("mlp_bias"):
        layer |= {"mlp.gate_proj.bias": (wide,), "mlp.up_proj.bias": (wide,), "mlp.down_proj.bias": (hidden,)}
    layers = range(config["num_hidden_layers"])
    names = {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
    names |= {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    return names if config["tie_word_embeddings"] else names | {"lm_head.weight": (config["vocab_size"], hidden)}
