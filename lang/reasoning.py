"""`separate_reasoning`: what a model thought and what it answered, told apart by a parser plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from phloem.errors import PluginError, RequestError
from phloem.interfaces import Parser, PluginContext
from phloem.registry import Registry, construct


class Choice(NamedTuple):
    """A parser plugin, and whether answers begin within a thought though nothing shows it."""

    plugin: str
    opened: bool = False


# "auto", and the names by which SGLang's programs call for a format.
FAMILIES: Mapping[str, Choice] = {
    "auto": Choice("think"),
    "qwen3": Choice("think"),
    "glm45": Choice("think"),
    "deepseek-v3": Choice("think"),
    "deepseek-r1": Choice("think", opened=True),
    "qwen3-thinking": Choice("think", opened=True),
    "gpt-oss": Choice("harmony"),
}


def reasoning_name(name: str | None) -> str | None:
    """The variable that holds the thought of the variable `name`."""
    return None if name is None else f"{name}_reasoning_content"


def find_parser(name: str) -> Parser:
    """The parser of that name. Raises RequestError."""
    choice = FAMILIES.get(name, Choice(name))
    try:
        cls = Registry().load("parser", choice.plugin)
    except PluginError as error:
        families = ", ".join(FAMILIES)
        raise RequestError(
            f"no reasoning parser is named {name!r}", hint=f"a parser plugin, or one of {families}", param="model_type"
        ) from error
    if "reasoning" not in cls.capabilities:
        raise RequestError(f"the parser {name!r} reads no thoughts", param="model_type")
    options = cls.Options(opened=True) if choice.opened else cls.Options()
    parser: Parser = construct("parser", choice.plugin, cls, options, PluginContext("parser", choice.plugin))
    return parser


def told_apart(parser: Parser, prompt: str, text: str) -> tuple[str, str]:
    """The thought and the answer of a whole text; `prompt` is the end of what came before it."""
    stream = parser.stream((), prompt)
    pieces = [*stream.push(text), *stream.finish()]
    thought = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    return thought, "".join(piece.text for piece in pieces if piece.kind != "reasoning")
