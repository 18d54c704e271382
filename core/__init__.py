"""phloem: a plugin-based engine that serves language models. Names load on first use, so the import is cheap."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .errors import PhloemError as PhloemError
    from .params import SamplingParams as SamplingParams
    from .results import Output as Output
    from .results import Result as Result

_HOME = {
    "Engine": "engine",
    "Output": "results",
    "PhloemError": "errors",
    "Result": "results",
    "SamplingParams": "params",
}

__all__ = ["Engine", "Output", "PhloemError", "Result", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
