"""Tokenizers over pieces of bytes, and backends and walks over them, for tests of grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from phloem.interfaces import Grammar, Matcher, PluginContext, TokenizerData
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.registry import Registry
from phloem.tokenizer import _BYTES, Tokenizer

END = 0
BYTES = tuple(bytes([byte]) for byte in range(256))


def tokenizer_of(pieces: Sequence[bytes]) -> Tokenizer:
    """Token 0 is `<end>`, token i + 1 adds pieces[i] to a text."""
    spelled = {byte: char for char, byte in _BYTES.items()}
    names = ["<end>", *("".join(spelled[byte] for byte in piece) for piece in pieces)]
    end = {"id": END, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    data = {
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "version": "1.0",
        "added_tokens": [end | {"special": True}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }
    return Tokenizer(TokenizerData(json.dumps(data), special_tokens={"eos_token": "<end>"}))


def backend(name: str, pieces: Sequence[bytes] = BYTES) -> Grammar:
    """A grammar plugin over a vocabulary of pieces."""
    spec = ModelSpec("toy", len(pieces) + 1, 4096, (LayerSpec(1, 4, 4),), eos_token_ids=(END,))
    plugin: Any = Registry().load("grammar", name)
    grammar: Grammar = plugin(
        plugin.Options(), PluginContext("grammar", name, model=spec, tokenizer=tokenizer_of(pieces))
    )
    return grammar


def takes(start: Matcher, text: bytes) -> bool:
    """True if a text, byte by byte over `BYTES`, is accepted with the end behind it."""
    matcher = start.fork()
    return all(matcher.accept(byte + 1) for byte in text) and matcher.accept(END)


def allowed(matcher: Matcher, size: int) -> frozenset[int]:
    """Ids of the tokens that a mask over `size` tokens allows."""
    row = np.full((size + 31) // 32, 0x5A5A5A5A, dtype=np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
    return frozenset(np.flatnonzero(bits).tolist())
