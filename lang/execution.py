"""What each expression does to a branch and to its path. Called by the branch's task, one expression at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from phloem.errors import RequestError
from phloem.interfaces import Parser
from phloem.params import SamplingParams

from . import ir
from .backends.base import Generation, Path
from .cell import Cancelled, Cell
from .gathering import report
from .reasoning import find_parser, told_apart
from .sampling import typed

if TYPE_CHECKING:
    from .interpreter import Branch, Op

_TAIL = 256  # characters before an answer that a reasoning parser looks at: they may have opened a thought


async def execute(branch: Branch, op: Op, path: Path) -> Path:
    """Carry out one expression. Returns the path to go on with; raises what went wrong."""
    expr = op.expr
    if isinstance(expr, ir.Gen):
        await _generate(branch, expr, op, path)
    elif isinstance(expr, ir.Select):
        selection = await path.select(expr.choices, expr.method, expr.temperature)
        branch.write(selection.choice, op.cell)
        _cell(op).set(selection.choice, report(selection))
    elif isinstance(expr, ir.SeparateReasoning):
        return await _separate(branch, expr, op, path)
    elif isinstance(expr, ir.Fork):
        for child, fork in zip(op.branches, path.fork(expr.count), strict=True):
            child.open(branch, fork)
    elif isinstance(expr, ir.ConcatAndAppend):
        await _concatenate(branch, op, path)
    elif isinstance(expr, ir.CommitLazy):
        await path.commit()
    elif isinstance(expr, ir.Variable):
        _add(branch, path, str(await branch.cells[expr.name].aget()))
    else:
        _note(branch, expr, op, path)
    return path


def _note(branch: Branch, expr: ir.Expr, op: Op, path: Path) -> None:
    """What only adds text or notes a place: costs nothing."""
    if isinstance(expr, ir.Constant):
        _add(branch, path, expr.text)
    elif isinstance(expr, ir.RoleBegin):
        if branch.role is not None:
            raise RequestError(
                f"a {expr.role} message begins inside a {branch.role[0]} message", hint="messages cannot be nested"
            )
        branch.write(path.begin(expr.role))
        branch.role = expr.role, len(branch.text.text())
    elif isinstance(expr, ir.RoleEnd):
        if branch.role is None or branch.role[0] != expr.role:
            raise RequestError(f"a {expr.role} message ends that has not begun")
        branch.messages.append({"role": expr.role, "content": branch.text.text()[branch.role[1] :]})
        branch.role = None
        branch.write(path.end(expr.role))
    elif isinstance(expr, ir.ScopeBegin):
        branch.scopes[expr.name] = len(branch.text.text())
        branch.scoped.append(_cell(op))
    elif isinstance(expr, ir.ScopeEnd):
        _cell(op).set(branch.text.text()[branch.scopes.pop(expr.name) :])
    else:
        assert isinstance(expr, ir.Media), expr
        raise RequestError(
            f"{expr.what} needs a model with vision, which this backend does not have",
            hint="describe it in text, or use another backend",
            param=expr.what,
        )


def _add(branch: Branch, path: Path, text: str) -> None:
    path.append(text)
    branch.write(text)


async def _concatenate(branch: Branch, op: Op, path: Path) -> None:
    for child in op.branches:
        await child.mark().ready()
        if isinstance(child.error, Cancelled):
            continue  # a branch that was cancelled adds nothing
        if child.error is not None:
            raise child.error
        _add(branch, path, child.text.text()[child.fork_start :])


# --- gens


def _params(branch: Branch, expr: ir.Gen) -> SamplingParams:
    """The run's parameters, the gen's own, and what its type asks for. Raises RequestError."""
    return SamplingParams(**typed({**branch.run.defaults, **expr.given}, expr.dtype))


async def _generate(branch: Branch, expr: ir.Gen, op: Op, path: Path) -> None:
    params, cell, streamed = _params(branch, expr), _cell(op), 0

    def on_text(delta: str) -> None:
        nonlocal streamed
        streamed += len(delta)
        branch.write(delta, cell)

    generation = await path.generate(params, on_text if branch.run.stream else None)
    branch.write(generation.texts[0][streamed:], cell)
    _fill(branch, expr, cell, generation, params)


def _fill(branch: Branch, expr: ir.Gen, cell: Cell, generation: Generation, params: SamplingParams) -> None:
    """Set a gen's variable: a list where n is above 1."""
    start = branch.run.logprob_start if expr.logprob_start is None else expr.logprob_start
    metas = [report(generation, i, start) for i in range(len(generation.texts))]
    if params.n == 1:
        cell.set(generation.texts[0], metas[0])
    else:
        cell.set(list(generation.texts), metas)


# --- thoughts


async def _separate(branch: Branch, expr: ir.SeparateReasoning, op: Op, path: Path) -> Path:
    """Carry out what is inside. Returns a path without the thoughts, if there were any.

    They were generated on `path`; the answers are written to a fork made before it.
    """
    parser = find_parser(expr.parser)
    clean = path.fork(1)[0]
    thought = False
    try:
        for inner in op.inner:
            if isinstance(inner.expr, ir.Gen):
                thought = await _think(branch, inner.expr, inner, path, parser) or thought
                value = _cell(inner).result()
                clean.append(value if isinstance(value, str) else value[0])
            elif isinstance(inner.expr, (ir.Constant, ir.RoleBegin, ir.RoleEnd)):
                _note(branch, inner.expr, inner, path)
                _repeat(inner.expr, clean)
            else:
                raise RequestError(f"separate_reasoning takes gens, texts and roles, not a {inner.expr.kind}")
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


async def _think(branch: Branch, expr: ir.Gen, op: Op, path: Path, parser: Parser) -> bool:
    """One gen: its thought and its answer go to their cells. True if there was a thought."""
    cell, thought = _cell(op), op.thought
    assert thought is not None
    prompt = branch.text.text()[-_TAIL:]
    stream = parser.stream((), prompt)

    def hand_out(delta: str, *, last: bool = False) -> None:
        for piece in stream.finish() if last else stream.push(delta):
            if piece.kind == "reasoning":
                thought.push(piece.text)
            else:
                branch.write(piece.text, cell)

    params = _params(branch, expr)
    if parser.special:  # its markers would not be in the text
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    generation = await path.generate(params, hand_out if branch.run.stream else None)
    if not branch.run.stream:
        hand_out(generation.texts[0])
    hand_out("", last=True)
    pairs = [(thought.text(), cell.text()), *(told_apart(parser, prompt, text) for text in generation.texts[1:])]
    thoughts = [pair[0] for pair in pairs]
    thought.set(thoughts[0] if params.n == 1 else thoughts)
    _fill(branch, expr, cell, replace(generation, texts=[pair[1] for pair in pairs]), params)
    return any(thoughts)


def _cell(op: Op) -> Cell:
    assert op.cell is not None
    return op.cell
