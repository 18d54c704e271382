"""A third party's parser: a call is `CALL name!`. Found by `module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import Piece, PluginContext, Tool


class Stream:
    """Reads at the end."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> list[Piece]:
        self.text += text
        return []

    def finish(self) -> list[Piece]:
        if not self.text.startswith("CALL "):
            return [Piece("content", self.text)]
        return [Piece("call", self.text[5:-1]), Piece("arguments", "{}")]


class Shouting:
    """Kind `parser`."""

    api = 1
    capabilities: ClassVar[frozenset[str]] = frozenset({"tools"})
    special = False
    think = None

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        del options, context

    @classmethod
    def matches(cls, template: str) -> bool:
        return False

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> Stream:
        return Stream()

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        return None

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        return "Shout CALL name!"

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"CALL {name}!" for name, _ in calls)

    def result_text(self, name: str, content: str) -> str:
        return content
