"""A key scheme for tests: callers share the beginning of their texts, and nothing behind it."""

from __future__ import annotations

from array import array
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.messages import GenerateCall


class Own:
    """Behind the first `shared` tokens each routing key has keys of its own."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        shared: int = 3

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._shared = options.shared

    def keys(self, tokens: array[int], start: int, call: GenerateCall) -> array[int]:
        """One key per token of tokens[start:]."""
        own = sum((call.routing_key or "").encode()) << 24
        return array("q", (own * (i >= self._shared) + t for i, t in enumerate(tokens[start:], start)))
