"""The contract of kind `parser`: a model's own format of tool calls and thoughts, in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of the arguments object
    strict: bool = False


class Piece(NamedTuple):
    """A part of a model's answer, in order. Joined, the texts of one kind (and call) are the whole of it."""

    kind: str  # "content", "reasoning", "call" (a call begins; text is its name) or "arguments" (JSON text)
    text: str
    call: int = 0  # which call, from 0: for "call" and "arguments"


class ParserStream(Protocol):
    """Parses one answer. What it returns for a text is the same for every way of cutting the text into pushes."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now. Called once per event of a streamed answer."""

    def finish(self) -> list[Piece]:
        """What was held back. An unfinished call is given as content or as far as it is certain, never dropped."""


class Parser(Protocol):
    """Kind `parser`. A model's own format of tool calls and thoughts, defined once: to constrain and to parse.

    Capabilities: `tools`, `reasoning`. Used by `api` plugins in the server's process: no engine, no torch.
    """

    capabilities: frozenset[str]
    special: bool  # its markers are special tokens: the text must be produced with skip_special_tokens=False
    think: tuple[str, str] | None  # texts that open and close a thought; None: the format has none

    @classmethod
    def matches(cls, template: str) -> bool:
        """True if a chat template (its Jinja source) is one of this format: how `auto` chooses."""

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> ParserStream:
        """A parser of one answer. `prompt` is the end of the prompt's text, which may have opened a thought."""

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """A structural tag (`{"type": "structural_tag", "format": ...}`) that holds the answer to the format.

        `choice`: "auto" (text, or calls), "required" (one call at least), or a tool's name. None: nothing to enforce.
        """

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """The system text that tells a model of its tools, for templates that ignore them."""

    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Earlier calls, (name, JSON text of the arguments) each, as the model would have written them."""

    def result_text(self, name: str, content: str) -> str:
        """A tool's answer as the text of a user message, for templates that know no role `tool`."""
