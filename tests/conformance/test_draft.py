"""The drafter `draft` passes the suite that any drafter can run, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from phloem.interfaces import PluginContext
from phloem.plugins.spec.draft import DraftDrafter
from phloem.testing import SpecSuite
from phloem.testing.plugin import TOY_SPEC
from phloem.tokenizer import Tokenizer


class TestDraft(SpecSuite):
    plugin = DraftDrafter
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, tiny_model: Callable[[str], Path]) -> None:
        self.folder = tiny_model("llama")

    def make(self) -> Any:
        """On a tiny model, for a target whose head has the first 32 of its tokens."""
        from phloem.plugins.model._source import open_source

        tokenizer = Tokenizer(open_source(str(self.folder)).tokenizer())
        context = PluginContext("spec", "draft", model=replace(TOY_SPEC, eos_token_ids=(1,)), tokenizer=tokenizer)
        drafter = DraftDrafter(DraftDrafter.Options(model=str(self.folder), **self.options), context)
        drafter.allocate(2048, 8)
        return drafter


@pytest.mark.slow
class TestDraftSmall(TestDraft):
    """With leaves, and so few slots that texts displace each other."""

    options: ClassVar[dict[str, Any]] = {"breadth": 3, "max_tokens": 8}

    def make(self) -> Any:
        """Room for three texts."""
        drafter = super().make()
        drafter.allocate(90, 3)
        return drafter
