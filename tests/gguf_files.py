"""Writes tiny GGUF files for tests: the layout changes of llama.cpp's converter, over gguf's own writer and names."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Values = np.ndarray[Any, np.dtype[Any]]


def convert(
    folder: Path,
    file: Path,
    arch: str,
    *,
    drop: Collection[str] = (),
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    pre: str | None = "gpt-2",
    stored: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """Write a model folder (llama, qwen2, qwen3, gemma2 or gemma3) as a GGUF file of architecture `arch`.

    `drop`: GGUF tensor names left out. `extra` may add metadata and tensors. `pre`: name of the word splitting.
    `stored`: how a matrix of this name is stored, such as Q8_0; vectors are float32.
    """
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    _hyperparameters(writer, config, arch)
    _vocabulary(writer, folder, pre)
    if extra is not None:
        extra(writer)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, values in load_file(folder / "model.safetensors").items():
        if arch.startswith("gemma") and name == "lm_head.weight":
            continue  # the embedding serves as output head
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if target not in drop:
            values, form = _layout(values, target, arch, config), gguf.GGMLQuantizationType[stored(target)]
            if values.ndim == 1 or form == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(target, values)
            else:
                writer.add_tensor(target, gguf.quantize(values, form), raw_dtype=form)
    close(writer)
    return file


def close(writer: gguf.GGUFWriter) -> None:
    """Write everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layout(values: Values, name: str, arch: str, config: dict[str, Any]) -> Values:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def _hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    rope = config["rope_parameters"]
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if arch == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch.startswith("gemma") or config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    if arch.startswith("gemma"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch == "gemma2" and config["final_logit_softcapping"] is not None:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _vocabulary(writer: gguf.GGUFWriter, folder: Path, pre: str | None) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = document["model"]["vocab"]
    added = {token["id"] for token in document["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in added else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_bos_token_id(vocab[settings["bos_token"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    writer.add_chat_template(settings["chat_template"])


def write_sentencepiece(file: Path, *, arch: str = "llama", prefix: bool = True) -> Path:
    """A GGUF file with a small SentencePiece vocabulary with byte tokens, and no tensors."""
    words = ["he", "ll", "hell", "hello", "\u2581he", "\u2581hello", "lo", "\u2581w", "or", "ld", "orld", "\u2581world"]
    pieces = [*"helowrd\u2581xyz'\u4f60.,", *words, "\n\n", "  " if arch == "gemma3" else "\u2581\u2581"]
    special = ["<unk>", "<s>", "</s>", "<|mark|>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    writer = gguf.GGUFWriter(file, arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 260 + [-float(i) for i in range(len(pieces))])
    kinds = [2, 3, 3, 4] + [6] * 256 + [1] * len(pieces)
    if arch == "gemma3":
        kinds[tokens.index("\n\n")] = 4
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not prefix:
        writer.add_add_space_prefix(False)
    close(writer)
    return file
