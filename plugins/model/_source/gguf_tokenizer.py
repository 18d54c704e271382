"""A GGUF file's vocabulary to a `tokenizers` tokenizer.json, as transformers' own GGUF loading builds it.

Two families: byte-level BPE ("gpt2"), whose merges are in the file and whose word splitting has a name, and
SentencePiece ("llama"), whose merges follow from the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phloem.errors import ModelError
from phloem.interfaces import TokenizerData

from .bpe_merges import merges_by_position, merges_by_score
from .gguf_file import GgufFile
from .post_processor import template_processor
from .pre_tokenizers import PLAIN, SPLITS, STARTS_WITH_BOS, UNMERGED

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole in a text
_SPACE = "\u2581"  # SentencePiece's spelling of a space
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}


def tokenizer_from_gguf(file: GgufFile) -> TokenizerData:
    """The tokenizer and chat template of a file; raises ModelError naming what is not understood. Called once."""
    meta = file.metadata
    family = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path} has no tokenizer", hint="use a GGUF file that was converted with its tokenizer")
    if family == "gpt2":
        parts = _byte_level(file, tokens)
    elif family == "llama" and str(meta.get("general.architecture")).startswith("gemma"):
        parts = _gemma(meta, tokens)
    elif family == "llama":
        parts = _sentencepiece(meta, tokens)
    else:
        raise ModelError(
            f"{file.path} has a tokenizer of type '{family}'; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) "
            "are read",
            hint="load the model from a folder with tokenizer.json",
        )
    vocab = parts["model"]["vocab"]
    special = _named_tokens(meta, tokens, vocab)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta, tokens, vocab, set(special.values())),
        "post_processor": _post_processor(meta, special, vocab),
        **parts,
    }
    return TokenizerData(
        json=json.dumps(document, ensure_ascii=False),
        chat_template=meta.get("tokenizer.chat_template"),
        special_tokens=special,
    )


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    pre = str(file.metadata.get("tokenizer.ggml.pre"))
    if pre not in SPLITS and pre not in PLAIN:
        raise ModelError(
            f"{file.path} splits words by the rule '{pre}', which is not known",
            hint=f"known: {', '.join(sorted([*SPLITS, *PLAIN]))}; or load the model from a folder with tokenizer.json",
        )
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if pre in PLAIN:
        pre_tokenizer: dict[str, Any] = byte_level | {"use_regex": True}
    else:
        split = {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    merges = [merge.split(" ") for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": pre in UNMERGED}
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", **model, "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def _gemma(meta: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    # files spell runs of spaces as spaces, while the normalizer turns a text's spaces into U+2581
    spelled = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: i for i, token in enumerate(spelled)}
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 3)]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": _piece_decoders()},
        "model": _piece_model(vocab, meta.get("tokenizer.ggml.merges"), merges_by_position(vocab), unknown),
    }  # fmt: skip


def _sentencepiece(meta: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, meta.get("tokenizer.ggml.scores", [0.0] * len(tokens)), strict=False))
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    scheme = "first" if prefix else "never"
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": _piece_decoders() + strip},
        "model": _piece_model(vocab, meta.get("tokenizer.ggml.merges"), merges_by_score(vocab, scores), None),
    }


def _piece_decoders() -> list[dict[str, Any]]:
    space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return [space, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _piece_model(
    vocab: dict[str, int], given: list[str] | None, implied: list[tuple[str, str]], unknown: str | None
) -> dict[str, Any]:
    merges = [merge.split(" ") for merge in given] if given else implied
    flags = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {"type": "BPE", **flags, "vocab": vocab, "merges": merges}


def _named_tokens(meta: dict[str, Any], tokens: Sequence[str], vocab: dict[str, int]) -> dict[str, str]:
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    if str(meta.get("general.architecture")).startswith("gemma") and "<mask>" in vocab:
        named.setdefault("mask_token", "<mask>")
    return named


def _added_tokens(
    meta: dict[str, Any], tokens: Sequence[str], vocab: dict[str, int], named: set[str]
) -> list[dict[str, Any]]:
    kinds = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": i, "content": token, **flags, "special": kind == _CONTROL or token in named}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if (kind in (_CONTROL, _USER_DEFINED) or token in named) and vocab.get(token) == i
    ]


def _post_processor(meta: dict[str, Any], special: dict[str, str], vocab: dict[str, int]) -> dict[str, Any] | None:
    pieces = meta["tokenizer.ggml.model"] == "llama" or meta.get("tokenizer.ggml.pre") in STARTS_WITH_BOS
    first = special.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", pieces) else None
    last = special.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    return template_processor(first, last, vocab)
