"""LFM2 (Liquid AI): how its config and its tensors are spelled where Llama's are spelled otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LFM2_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "final_norm": "embedding_norm",
}


def lfm2_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with Llama's keys for what it calls otherwise or leaves to be computed.

    After `Lfm2Config` and `Lfm2MLP` of transformers: two thirds of the stated width, times a factor, rounded up.
    """
    width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
    if config.get("block_auto_adjust_ff_dim", True) and isinstance(width, int):
        width = int(2 * width / 3)
        factor, step = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        if factor is not None:
            width = -(-int(factor * width) // step) * step
    made = {
        **config,
        "intermediate_size": width,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "tie_word_embeddings": config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        "num_key_value_heads": config.get("num_key_value_heads", 8),
    }
    if not config.get("layer_types"):
        layers = int(config.get("num_hidden_layers") or 0)
        attending = config.get("full_attn_idxs")
        attending = range(layers) if attending is None else attending
        made["layer_types"] = ["full_attention" if i in attending else "conv" for i in range(layers)]
    return made
