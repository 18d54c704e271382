"""Reasoning only: thoughts between <think> markers, everything else is content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phloem.errors import RequestError
from phloem.interfaces import Tool

from ._format import Format
from ._parser import FormatParser, ThinkOptions


class Think(FormatParser):
    """For models that think and know no tools."""

    capabilities = frozenset({"reasoning"})
    Options = ThinkOptions
    format = Format(think=("<think>", "</think>"))

    @classmethod
    def matches(cls, template: str) -> bool:
        """Templates that know thoughts and no tools."""
        return "</think>" in template and "tools" not in template and "<｜Assistant｜>" not in template

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """None without tools. Raises RequestError with any."""
        return _refuse() if tools else None

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Empty without tools. Raises RequestError with any."""
        return _refuse() if tools else ""

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Empty without calls. Raises RequestError with any."""
        return _refuse() if calls else ""


def _refuse() -> Any:
    raise RequestError("the parser think reads no tool calls", hint="choose another parser: generic", param="tools")
