"""`separate_reasoning`: what a model thought and what it answered, told apart by a parser plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from phloem.errors import PluginError, RequestError
from phloem.interfaces import Parser, PluginContext
from phloem.registry import Registry, construct

from . import ir
from .backends.base import Path

if TYPE_CHECKING:
    from .interpreter import Branch, Op

_TAIL = 256  # characters before an answer that a parser looks at: they may have opened a thought


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


async def split_thoughts(branch: Branch, expr: ir.SeparateReasoning, op: Op, path: Path) -> Path:
    """Carry out what is inside. Returns the path to go on with: without the thoughts, if there were any.

    The thought was generated on `path`; the answers are written to a fork made before it.
    """
    parser = find_parser(expr.parser)
    clean = path.fork(1)[0]
    thought = False
    try:
        for inner in op.inner:
            if isinstance(inner.expr, ir.Gen):
                found = await _generate(branch, inner.expr, inner, path, parser)
                thought = thought or found
                assert inner.cell is not None
                value = inner.cell.result()
                clean.append(value if isinstance(value, str) else value[0])
            elif isinstance(inner.expr, (ir.Constant, ir.RoleBegin, ir.RoleEnd)):
                await branch.note(inner.expr, inner, path)
                _repeat(inner.expr, clean)
            else:
                raise RequestError(f"separate_reasoning takes gens, texts and roles, not {inner.expr.kind}")
    except BaseException:
        await clean.close()
        raise
    left, kept = (path, clean) if thought else (clean, path)
    await left.close()
    return kept


def _repeat(expr: ir.Expr, clean: Path) -> None:
    if isinstance(expr, ir.Constant):
        clean.append(expr.text)
    elif isinstance(expr, ir.RoleBegin):
        clean.begin(expr.role)
    elif isinstance(expr, ir.RoleEnd):
        clean.end(expr.role)


async def _generate(branch: Branch, expr: ir.Gen, op: Op, path: Path, parser: Parser) -> bool:
    """One gen: its thought and its answer go to their cells. True if there was a thought."""
    assert op.cell is not None
    assert op.thought is not None
    cell, thought = op.cell, op.thought
    prompt = branch.text.text()[-_TAIL:]
    stream = parser.stream((), prompt)

    def hand_out(delta: str, *, last: bool = False) -> None:
        for piece in stream.finish() if last else stream.push(delta):
            if piece.kind == "reasoning":
                thought.push(piece.text)
            else:
                branch.write(piece.text, cell)

    params = branch.params(expr)
    if parser.special:  # its markers would not be in the text
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    generation = await path.generate(params, hand_out if branch.run.stream else None)
    if not branch.run.stream:
        hand_out(generation.texts[0])
    hand_out("", last=True)
    pairs = [(thought.text(), cell.text())]
    for text in generation.texts[1:]:
        other = parser.stream((), prompt)
        pieces = [*other.push(text), *other.finish()]
        told = ["".join(p.text for p in pieces if (p.kind == "reasoning") is kind) for kind in (True, False)]
        pairs.append((told[0], told[1]))
    answers, thoughts = [answer for _, answer in pairs], [found for found, _ in pairs]
    single = params.n == 1
    thought.set(thoughts[0] if single else thoughts)
    branch.report(expr, cell, replace(generation, texts=answers), params)
    return any(thoughts)
