"""Helpers shared by the tests: tiny seeded transformers models with a tiny trained tokenizer, and reference models."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HIDDEN, HEADS, KV_HEADS, LAYERS, WINDOW, CONTEXT = 64, 4, 2, 3, 16, 1024
CORPUS = """The sugar a leaf makes travels down the stem in the phloem, and the water goes up in the xylem.
A tree of tokens grows the same way: one root, many branches, and whatever two requests share is stored once.
def match(tokens): return [node for node in tokens if node is not None]  # 0 1 2 3 4 5 6 7 8 9 10 11 12 2024
{"name": "Ada", "age": 36, "tags": ["a", "b"]} naïve café, größer, 你好，世界, привет мир, emoji 🙂🌳, tabs\t\tand\n
When in the course of events it becomes necessary to test a thing, the thing is tested; when not, it is not tested.
The quick brown fox jumps over the lazy dog while the other foxes sleep, and the dogs sleep, and everything sleeps.
"""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": CONTEXT, "n_inner": 128}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
# transformers' model_type, and what differs from the common sizes. The last block holds what may have to be refused.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 24, "norm_topk_prob": True, **_MOE}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "layer_types": _ALTERNATE},
    ),
    "gemma3": ("gemma3_text", {**_GEMMA, "layer_types": _ALTERNATE}),
    "phi3": ("phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": _ALTERNATE, "head_dim": 16, "logit_scale": 0.5}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
    "gpt2": ("gpt2", _GPT2),
    "bloom": ("bloom", {"n_head": HEADS, "n_layer": LAYERS}),  # ALiBi
    "mpt": ("mpt", {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": CONTEXT}),  # ALiBi
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "head_dim": 16,
        },
    ),  # attention sinks
}

# Models with recurrent layers, which only native code serves.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 16,
            "norm_eps": 1e-5,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "expand": 2,
            "n_groups": 2,
            "state_size": 16,
            "time_step_limit": (0.0, 1.0),
            "chunk_size": 16,  # of transformers' own passes
        },
    ),
}


def make_tiny_model(arch: str, folder: Path) -> Path:
    """Write a random float32 model of `arch` (a key of ARCHITECTURES or RECURRENT) with its tokenizer to `folder`.

    Returns the folder.

    Weights are seeded and larger than usual, and norms and biases are random too, so that greedy outputs vary and a
    forgotten bias or norm shows.
    """
    import torch
    import transformers

    model_type, extra = (ARCHITECTURES | RECURRENT)[arch]
    sizes = {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | extra))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, 0.5 if parameter.shape[0] == 512 else 0.15)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Train and save a byte-level BPE of at most 512 tokens: ids 0 and 1 are bos and eos, 2 and 3 the chat marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def real_path(name: str) -> str:
    """The GGUF file of a known name, fetched once into the user's cache folder."""
    from phloem.plugins.model._source import resolve

    return resolve(name, progress=False)


@cache
def hf_folder(name: str) -> Path:
    """A float32 safetensors folder made by transformers from the GGUF file of `name`, kept in the user's cache folder.

    The reference of the equivalence tests: read by transformers itself, none of our reader is involved.
    """
    import torch
    import transformers

    source = Path(real_path(name))
    folder = Path.home() / ".cache" / "phloem" / "reference" / name
    if not (folder / "complete").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))  # renamed when whole: several processes may be here at once
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        model.hf_quantizer = None  # the weights are plain floats now; transformers would refuse to save them
        del model.config.quantization_config
        model.save_pretrained(made)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(made)
        (made / "complete").touch()
        if (folder / "complete").exists():
            shutil.rmtree(made)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


@cache
def hf_model(name: str) -> Any:
    """The reference transformers model of `name` in float32, eval mode, eager attention."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf_folder(name), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
