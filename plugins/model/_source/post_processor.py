"""The part of a tokenizer.json that puts special tokens around a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def template_processor(first: str | None, last: str | None, vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts `first` before and `last` after a text; None if there is nothing to add."""
    if first is None and last is None:
        return None

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        parts = [{"SpecialToken": {"id": token, "type_id": kind}} if token else None for token in (first, last)]
        return [part for part in (parts[0], {"Sequence": {"id": sequence, "type_id": kind}}, parts[1]) if part]

    added = [token for token in (first, last) if token]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in added},
    }
