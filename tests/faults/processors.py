"""Logits processors that misbehave on request; faults are served by naming them in a call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext, RowContext


class NoOptions(BaseModel):
    """No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Slow:
    """Holds the step for `seconds`, as a long kernel would: the interpreter is free meanwhile."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset()
    Options = NoOptions

    def __init__(self, options: NoOptions, context: PluginContext) -> None:
        del options, context

    def validate(self, arguments: dict[str, Any]) -> None:
        """Anything goes."""

    def process(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """Sleep."""
        time.sleep(max(row.arguments["seconds"] for row in rows))


class Bomb(Slow):
    """Raises."""

    def process(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """Raise."""
        raise ZeroDivisionError("boom")
