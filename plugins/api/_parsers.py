"""Which parsers read the answers of a model, and what its chat template can do: found out once per model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from phloem.config_sections import name_and_options
from phloem.errors import PluginError, RequestError
from phloem.interfaces import Parser, ParserStream, PluginContext
from phloem.registry import Registry

from ._guarded import Guarded
from ._reader import Hidden, Reader
from ._tools import Toolset

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

# What `auto` tries, in this order: installing a plugin never activates it.
_FORMATS = ("harmony", "deepseek", "mistral", "gemma", "llama3", "pythonic", "hermes")
_AUTO = {"tools": _FORMATS, "reasoning": (*_FORMATS, "think")}
_ANY_TOOLS = "generic"
_PROBE = "phloemprobe"  # looked for in what a template made of it
_USER = {"role": "user", "content": "x"}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}},
}
_NINE = re.compile(r"length\s*!=\s*9\b")  # Mistral's templates insist on ids of nine characters

Choice = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Formats:
    """A model's ways: its parsers, and what its chat template does with tools, names and system messages."""

    tools: Parser | None
    reasoning: Parser | None
    takes_tools: bool  # the template shows tools, calls and their results itself
    takes_names: bool
    takes_system: bool
    short_ids: bool
    hidden: Hidden | None  # the special tokens, if there are any

    @property
    def think(self) -> tuple[str, str] | None:
        """What opens and closes a thought."""
        return self.reasoning.think if self.reasoning is not None else None

    def reads(self, offered: Toolset, separate: bool) -> tuple[Parser | None, Parser | None]:
        """The parsers of an answer's thoughts and calls; one that reads both comes first, alone.

        Raises RequestError where such a one should read calls and leave thoughts in the text.
        """
        calls = self.tools if offered.tools else None
        if separate:
            return self.reasoning, None if calls is self.reasoning else calls
        if calls is not None and calls is self.reasoning:
            raise RequestError(
                "separate_reasoning false cannot be honoured with tools: one parser reads thoughts and calls",
                hint="leave it out, or give include_reasoning: false",
                param="separate_reasoning",
            )
        return None, calls

    def raw(self, thoughts: Parser | None, calls: Parser | None) -> bool:
        """Whether the parsers must see special tokens in the text."""
        used = [parser for parser in (thoughts, calls) if parser is not None]
        markers = [text.strip() for text in (thoughts.think if thoughts is not None else None) or ()]
        return any(parser.special for parser in used) or any(text in (self.hidden or ()) for text in markers)

    def reader(
        self,
        thoughts: Parser | None,
        calls: Parser | None,
        offered: Toolset,
        prompt: str,
        *,
        reasoning: bool = True,
        strip: bool = False,
    ) -> Reader:
        """A reader of one choice. `strip`: special tokens are in the text, and not for the caller."""
        first: ParserStream | None = None
        if thoughts is not None:
            first = thoughts.stream(offered.tools if thoughts is self.tools else (), prompt)
        second = calls.stream(offered.tools, prompt if first is None else "") if calls is not None else None
        return Reader(first, second, self.hidden if strip else None, reasoning=reasoning)


class Parsers:
    """The parsers that the configuration names; `auto` is settled when there is a model."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        """For `tools` and `reasoning` each auto, none, a plugin's name, or a mapping of `use` and the plugin's options.

        Raises PluginError for what cannot be loaded.
        """
        self._choices = {role: choices.get(role, "auto") for role in _AUTO}
        self._registry = Registry()
        self._built: dict[str, Parser] = {}
        self._formats: tuple[Tokenizer, Formats] | None = None
        for role, choice in self._choices.items():
            if choice not in ("auto", "none") and role not in self._parser(choice).capabilities:
                where = f"server.{'tool' if role == 'tools' else role}_parser"
                raise PluginError(f"{where}: '{name_and_options(choice)[0]}' reads no {role}")

    def formats(self, tokenizer: Tokenizer) -> Formats:
        """What is known of the model; the first call for a tokenizer imports parsers and renders probes."""
        if self._formats is None or self._formats[0] is not tokenizer:
            self._formats = tokenizer, self._found(tokenizer)
        return self._formats[1]

    def _found(self, tokenizer: Tokenizer) -> Formats:
        template = tokenizer.chat_template or ""
        tools, reasoning = (self._chosen(role, choice, template) for role, choice in self._choices.items())
        special = [tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)]
        return Formats(
            tools=tools,
            reasoning=reasoning,
            takes_tools=_shows(tokenizer, [_USER], tools=[_PROBE_TOOL]),
            takes_names=_shows(tokenizer, [_USER | {"name": _PROBE}]),
            takes_system=_shows(tokenizer, [{"role": "system", "content": _PROBE}, _USER]),
            short_ids=_NINE.search(template) is not None,
            hidden=Hidden(special) if special else None,
        )

    def _chosen(self, role: str, choice: Choice, template: str) -> Parser | None:
        if choice == "none":
            return None
        if choice != "auto":
            return self._parser(choice)
        for candidate in _AUTO[role]:
            cls = self._registry.load("parser", candidate)
            if role in cls.capabilities and cls.matches(template):
                parser = self._parser(candidate)
                if role == "tools" or _thinks(parser, template):
                    return parser
        return self._parser(_ANY_TOOLS) if role == "tools" else None

    def _parser(self, choice: Choice) -> Parser:
        """The parser of a choice; one object, be it for both roles."""
        key = repr(choice)
        if key not in self._built:
            self._built[key] = _build(self._registry, choice)
        return self._built[key]


def _build(registry: Registry, choice: Choice) -> Parser:
    """Raises PluginError. Options were checked with the config."""
    name, given = name_and_options(choice)
    cls = registry.load("parser", name)
    options = cls.Options(**given)
    try:
        parser = cls(options, PluginContext("parser", name))
    except Exception as error:
        raise PluginError(f"parser plugin '{name}' failed to start: {type(error).__name__}: {error}") from error
    return cast("Parser", Guarded(parser, name))


def _thinks(parser: Parser, template: str) -> bool:
    """Not every model of a format thinks: the template of one that does has a marker of thoughts."""
    return parser.think is None or any(text.strip() in template for text in parser.think)


def _shows(tokenizer: Tokenizer, messages: list[dict[str, Any]], **variables: Any) -> bool:
    """Whether the template puts a probe into the prompt."""
    try:
        tokens = tokenizer.chat(messages, **variables)
    except RequestError:
        return False
    return _PROBE in tokenizer.decode(tokens, skip_special_tokens=False)
