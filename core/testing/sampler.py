"""Conformance of kind `sampler`: rows are edited in place, each by its own context, and bad arguments are refused.

class TestMine(SamplerSuite):
    plugin = MyProcessor
    arguments = {"strength": 2.0}
    bad_arguments = ({"strength": "much"},)
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from ..errors import RequestError
from ..interfaces import LogitsProcessor, PluginContext, RowContext
from .plugin import TOY_SPEC, PluginSuite


class FakeProcessor:
    """Adds `bias` to one `token`: shows in an output whether, and for whom, a processor ran."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        pass

    def validate(self, arguments: dict[str, Any]) -> None:
        """Exactly `token` and `bias`."""
        if set(arguments) != {"token", "bias"}:
            raise RequestError("expected token and bias", param="logits_processors")

    def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
        """One addition a row."""
        for row, context in zip(logits, rows, strict=True):
            row[context.arguments["token"]] += context.arguments["bias"]


class SamplerSuite(PluginSuite):
    """Set `arguments` to ones that are right, and `bad_arguments` to some that must be refused."""

    kind = "sampler"
    arguments: ClassVar[dict[str, Any]] = {}
    bad_arguments: ClassVar[tuple[dict[str, Any], ...]] = ({"no such argument": 1},)

    def processor(self) -> LogitsProcessor:
        """`make`, typed."""
        processor: LogitsProcessor = self.make()
        return processor

    def rows(self) -> list[RowContext]:
        """Contexts of all sorts: no output yet, some, and a long prompt."""
        texts: tuple[tuple[list[int], list[int]], ...] = (([1], []), ([1, 2, 3], [4]), (list(range(20)), [5, 6, 5, 6]))
        return [RowContext(f"call{i}/0", dict(self.arguments), p, o) for i, (p, o) in enumerate(texts)]

    def test_arguments_are_validated(self) -> None:
        """Right ones pass; wrong ones are a RequestError, at arrival."""
        processor = self.processor()
        processor.validate(dict(self.arguments))
        for bad in self.bad_arguments:
            with pytest.raises(RequestError):
                processor.validate(bad)

    def test_edits_in_place(self) -> None:
        """Shape and type stay, nothing becomes NaN, and a token stays possible."""
        logits = torch.randn(3, TOY_SPEC.vocab_size, generator=torch.Generator().manual_seed(0))
        self.processor().process(logits, self.rows())
        assert logits.shape == (3, TOY_SPEC.vocab_size)
        assert not logits.isnan().any()
        assert (logits.amax(-1) > float("-inf")).all(), "no token is left"

    def test_rows_are_independent(self) -> None:
        """A row alone gets what it gets in company, in any order: drafts and batches change no output."""
        logits = torch.randn(3, TOY_SPEC.vocab_size, generator=torch.Generator().manual_seed(1))
        rows, processor = self.rows(), self.processor()
        together = logits.clone()
        processor.process(together, rows)
        for i in (2, 0, 1):
            alone = logits[i : i + 1].clone()
            processor.process(alone, rows[i : i + 1])
            torch.testing.assert_close(alone[0], together[i])
