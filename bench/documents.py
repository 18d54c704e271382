"""Judges documents that engines wrote under a JSON schema: each engine's by the same validator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]


def judge(documents: Sequence[tuple[str, int]], schema: dict[str, Any], most: int, seconds: float) -> dict[str, float]:
    """`documents`: texts, and their tokens; `most` tokens were allowed, `seconds` were taken by all.

    `valid` ones, those `cut` at the limit, and `wrong` ones: an engine that ends such has not enforced the schema.
    `s_valid` is seconds per valid document, infinite when there is none.
    """
    validator = jsonschema.Draft202012Validator(schema)
    good = [_valid(text, validator) for text, _ in documents]
    cut = sum(tokens >= most and not fine for (_, tokens), fine in zip(documents, good, strict=True))
    return {
        "documents": len(documents),
        "valid": sum(good),
        "cut": cut,
        "wrong": len(documents) - sum(good) - cut,
        "tokens_a_document": sum(tokens for _, tokens in documents) / len(documents),
        "s_valid": seconds / sum(good) if any(good) else float("inf"),
    }


def _valid(text: str, validator: jsonschema.Draft202012Validator) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False
