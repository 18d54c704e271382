"""Cache component: of layers with a window, the beginnings of texts stay longer than their middles."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from phloem.components import Component, Run, TreeNode
from phloem.interfaces import PluginContext


class TrunkWindow(Component):
    """Windows in the first `trunk` tokens of a text, such as a system prompt, get a second chance before they go.

    `window` lets go first of what no match has ended at. That is the middle of a long prompt, and the system prompt at
    its beginning as well, although the next conversation joins there: with few slots it is computed again and again.
    """

    class Options(BaseModel):
        """Options of `cache: {components: {window: {use: trunk-window}}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        trunk: int = Field(default=1024, ge=1)
        """Tokens at the beginning of a text that count as used when their turn to go first comes."""

    def __init__(self, options: Any, context: PluginContext) -> None:
        super().__init__(options, context)
        page = context.page_size
        self._trunk: int = -(-options.trunk // page) * page

    def pop(self) -> TreeNode | None:
        """Passes over what was never used in a trunk, once: it counts as used now."""
        while (node := super().pop()) is not None:
            run: Run = node.states[self.index]
            if run.last_access or node.start >= self._trunk:
                return node
            inside = self._trunk - node.start
            if inside >= node.tokens:
                self.use(run, self.tree.clock)
                continue
            upper: TreeNode = self.tree.split(node, inside)
            self.use(upper.states[self.index], self.tree.clock)
            return node
        return None
