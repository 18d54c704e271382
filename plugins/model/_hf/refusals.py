"""What a config alone shows that cannot be served exactly. Imports nothing, so `supports` stays cheap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

INSTALL_HINT = 'pip install "phloem[transformers]"'
_SINKS = "its attention sinks change every softmax, which paged attention does not know"
_ALIBI = "its ALiBi biases depend on distances, which paged attention does not know"
_BY_TYPE = {"bloom": _ALIBI, "mpt": _ALIBI, "gpt_oss": _SINKS}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_GROWING_ROPE = ("dynamic", "longrope")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be served exactly, as far as the config tells; or None."""
    text = {**config, **(config.get("text_config") or {})}
    model_type = str(config.get("model_type"))
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    if text.get("alibi") or text.get("position_embedding_type") == "alibi":
        return _ALIBI
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    other = sorted(set(text.get("layer_types") or ()) - _ATTENTION_LAYERS)
    if other:
        return f"its layers of kind {', '.join(other)} are not attention over all or the last tokens"
    for kind in _rope_types(text.get("rope_parameters") or text.get("rope_scaling") or {}):
        if kind in _GROWING_ROPE:
            return (
                f"rope type {kind!r} changes a token's keys with the length of its sequence, so they cannot be shared"
            )
    return None


def not_installed() -> str | None:
    """The reason when transformers is missing; does not import it."""
    return None if find_spec("transformers") else f"transformers is not installed ({INSTALL_HINT})"


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    yield str(parameters.get("rope_type") or parameters.get("type"))
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield from _rope_types(value)
