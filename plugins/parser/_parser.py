"""What parsers share whose answers a `Format` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import ParserStream, PluginContext, Tool

from ._format import Format
from ._prompt import instructions
from ._stream import FormatStream
from ._tag import constraint


class NoOptions(BaseModel):
    """No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ThinkOptions(BaseModel):
    """Where thoughts begin."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    opened: bool = False
    """Answers begin within a thought, even where the prompt does not show it: for models that leave out its start."""


class FormatParser:
    """All of `Parser` by a `format`. A subclass says which, and which templates are of it."""

    api = 1
    capabilities: frozenset[str] = frozenset({"tools"})
    Options: ClassVar[type[BaseModel]] = NoOptions
    format: ClassVar[Format]
    special = False
    result = "Result of {name}:\n{content}"  # a tool's answer as a user's message

    def __init__(self, options: BaseModel, context: PluginContext) -> None:
        self.think = self.format.think
        self._opened = isinstance(options, ThinkOptions) and options.opened

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> ParserStream:
        """A parser of one answer."""
        return FormatStream(self.format, tools, self._opened or self._opens(prompt))

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """The structural tag. Raises RequestError for a tool that is not there, or a schema beyond the format."""
        return constraint(self.format, tools, choice, parallel)

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """The tools, and how to call them."""
        return instructions(self.format.forms[0], tools, parallel and not self.format.single)

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls in the first form. Raises RequestError for arguments that the form cannot write."""
        return self.format.forms[0].text(calls)

    def result_text(self, name: str, content: str) -> str:
        """By the format's own markers for results, or in words."""
        return self.result.replace("{name}", name).replace("{content}", content)

    def _opens(self, prompt: str) -> bool:
        """A prompt has opened a thought if it ends with what opens one: further up it is somebody's text."""
        return self.think is not None and prompt.rstrip().endswith(self.think[0].strip())
