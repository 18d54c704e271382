"""What the suites of all kinds share: how the plugin under test is made, and the contract of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..interfaces import PluginContext
from ..model_spec import LayerSpec, ModelSpec
from ..registry import check_contract

TOY_SPEC = ModelSpec("toy", vocab_size=32, context_length=4096, layers=(LayerSpec(1, 4, 4),), eos_token_ids=(0,))


class PluginSuite:
    """Subclass the suite of a kind and set `plugin`; `options` are its options, or replace `make`."""

    kind: ClassVar[str]
    plugin: ClassVar[type[Any]]
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self) -> Any:
        """A fresh instance of the plugin under test."""
        context = PluginContext(self.kind, "under test", model=TOY_SPEC)
        return self.plugin(self.plugin.Options(**self.options), context)

    def test_keeps_the_contract(self) -> None:
        """`api`, `Options`, `capabilities` and every method of the kind's protocol are there and can be called."""
        check_contract(self.kind, self.plugin.__name__, self.plugin)

    def test_is_made_from_its_options(self) -> None:
        """The constructor takes (options, context), and may be called more than once."""
        assert self.make() is not self.make()
