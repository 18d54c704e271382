"""GGUF metadata to the content of a Hugging Face config.json.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's conversion script. What a file does
not say is what llama.cpp assumes when it runs one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phloem.errors import ModelError

from .gguf_file import GgufFile

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_WIDEST_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B models scale queries by hidden size / heads, not by head size
_LLAMA3_RANGE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The config of a file's model, in transformers' spelling. Raises ModelError for what cannot be served exactly."""
    arch = str(file.metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds the architecture '{arch}'; GGUF files of {', '.join(ARCHITECTURES)} are read",
            hint="other architectures load from a folder with config.json and *.safetensors",
        )
    keys = _Keys(file, arch)
    _refuse_experts(keys)
    config = _common(keys)
    if arch.startswith("gemma"):
        config |= _gemma(keys, config)
    else:
        config |= _llama_like(keys, config)
    config["architectures"] = [_CLASSES[config["model_type"]]]
    return config


def eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of turn and of message, as far as the file names them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


class _Keys:
    """The metadata of one architecture, by the names without its prefix."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{name}", default)

    def need(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if value is None:
            key = f"{self.arch}.{name}"
            raise ModelError(f"{self.file.path} lacks the metadata '{key}'", hint="convert the model again")
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ModelError(f"{self.file.path}: '{self.arch}.{name}' differs from layer to layer: {value}")
            value = value[0]
        return value


def _refuse_experts(keys: _Keys) -> None:
    if keys.get("expert_count"):
        raise ModelError(
            f"{keys.file.path} is a mixture of experts, which is not read from GGUF files",
            hint="load it from a folder with config.json and *.safetensors",
        )
    if keys.file.metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{keys.file.path} is one part of a split model", hint="join the parts: llama-gguf-split --merge"
        )


def _common(keys: _Keys) -> dict[str, Any]:
    hidden, heads = int(keys.need("embedding_length")), int(keys.need("attention.head_count"))
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{keys.file.path} lacks the tensor token_embd.weight", hint="it is not a complete model")
    head_dim = int(keys.get("attention.key_length") or keys.get("rope.dimension_count") or hidden // heads)
    if int(keys.get("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{keys.file.path}: keys and values have different widths, which {keys.arch} models cannot")
    if int(keys.get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{keys.file.path}: rotary embedding over a part of the head, which {keys.arch} models lack")
    layers = int(keys.need("block_count"))
    if not 0 < layers <= len(keys.file.tensors):
        raise ModelError(f"{keys.file.path} claims {layers} layers and has {len(keys.file.tensors)} tensors")
    ids = {name: keys.file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ID_KEYS.items()}
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(keys.need("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(keys.need("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(keys.need("context_length")),
        "rms_norm_eps": float(keys.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "dtype": "float32",
    } | {name: token for name, token in ids.items() if token is not None}


_ID_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _llama_like(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    tensors = keys.file.tensors
    extra: dict[str, Any] = {
        "model_type": keys.arch,
        "hidden_act": "silu",
        "rope_parameters": _rope(keys, float(keys.get("rope.freq_base", 10000.0)), config),
    }
    if keys.arch == "llama":
        extra["attention_bias"] = "blk.0.attn_q.bias" in tensors
        extra["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        if window:  # llama.cpp writes Mistral as llama; only the window tells
            extra |= {"model_type": "mistral", "sliding_window": int(window)}
    elif window:
        raise ModelError(f"{keys.file.path}: sliding windows are not read from GGUF files of {keys.arch}")
    else:
        extra["use_sliding_window"] = False
    if keys.arch == "qwen3":
        extra["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return extra


def _gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    widest = layers == _WIDEST_LAYERS[keys.arch]
    query_width = config["hidden_size"] // config["num_attention_heads"] if widest else config["head_dim"]
    theta = float(keys.get("rope.freq_base", 10000.0))
    period = 2 if keys.arch == "gemma2" else 6
    pattern = keys.get("attention.sliding_window_pattern", period)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % int(pattern) != 0 for i in range(layers)]
    extra: dict[str, Any] = {
        "model_type": "gemma2" if keys.arch == "gemma2" else "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": query_width,
        "sliding_window": int(keys.need("attention.sliding_window")),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0 if keys.arch == "gemma2" else None),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0 if keys.arch == "gemma2" else None),
        "rope_parameters": _rope(keys, theta, config),
    }
    if keys.arch == "gemma3":
        local = float(keys.get("rope.freq_base_swa", 10000.0))
        extra["rope_parameters"] = {
            "full_attention": extra["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return extra


def _rope(keys: _Keys, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    if "rope_freqs.weight" in keys.file.tensors:
        return _llama3_rope(keys, theta, config["head_dim"])
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    original = keys.get("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        yarn = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        return yarn | {"original_max_position_embeddings": int(original)}
    raise ModelError(
        f"{keys.file.path} scales its rotary embedding by '{kind}', which is not read from GGUF files",
        hint="load the model from a folder with config.json and *.safetensors",
    )


def _llama3_rope(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling: the file has one divisor per frequency, the config the few numbers they come from.

    The largest divisor is the factor; the others are Meta's published values, and are checked to give the same
    divisors.
    """
    divisors = keys.file.dequantise("rope_freqs.weight").astype(np.float64)
    factor = float(round(divisors.max()))
    low, high, context = _LLAMA3_RANGE.values()
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{keys.file.path} has rotary frequency factors (rope_freqs.weight) that are not those of Llama 3",
            hint="load the model from a folder with config.json and *.safetensors",
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_RANGE}
