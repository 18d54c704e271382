"""Carries out what a program appends. One `Branch` per state: a queue, and a task on the run's loop while it has work.

A program's thread (or its coroutine) only puts expressions into queues; it never waits unless it reads. What costs
nothing (text, roles) waits in the queue until somebody needs a result. A fork makes its branches at once: they hold
their own queues and begin when the parent has come to the fork.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phloem.errors import AbortedError, RequestError
from phloem.params import SamplingParams

from . import ir
from .backends.base import Generation, Path
from .cell import Cell
from .gathering import gathered, report
from .reasoning import reasoning_name, split_thoughts
from .sampling import typed

if TYPE_CHECKING:
    from .run import Run

LAZY = (ir.Constant, ir.RoleBegin, ir.RoleEnd, ir.ScopeBegin, ir.ScopeEnd)


class Cancelled(AbortedError):
    """The program cancelled the branch: what it had not produced is not coming, on purpose."""


@dataclass(slots=True)
class Op:
    """An expression in a queue, with the cells it will fill and the branches it opens or waits for."""

    expr: ir.Expr
    cell: Cell | None = None
    branches: list[Branch] = field(default_factory=list)
    inner: list[Op] = field(default_factory=list)
    thought: Cell | None = None


@dataclass(frozen=True, slots=True)
class Mark(ir.Expr):
    """A place in a queue that somebody waits for. Reached even after an error."""


@dataclass(frozen=True, slots=True)
class End(ir.Expr):
    """The end of a branch: what it holds is released."""


class Branch:
    """One state's queue and what came of it. Written to from the program's thread, carried out on the run's loop."""

    def __init__(self, run: Run, parent: Branch | None = None) -> None:
        self.run = run
        self.inherited: dict[str, Cell] = dict(parent.cells) if parent is not None else {}
        self.cells: dict[str, Cell] = dict(self.inherited)
        self.text = Cell(run.loop)
        self.closed = Cell(run.loop)
        self.messages: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.fork_start = 0  # length of the text that the fork began with
        self.children: list[Branch] = []
        self._path: Path | None = None
        self._role: tuple[str, int] | None = None  # the open message, and where its content begins
        self._scopes: dict[str, int] = {}  # open ones, and where their text begins
        self._scoped: list[Cell] = []
        self._expected: dict[str, Cell] = {}  # variables that somebody waits for before the program names them
        self._queue: deque[Op] = deque()
        self._lock = threading.Lock()
        self._blocked = parent is not None  # until the parent comes to the fork
        self._working = self._wanted = self._busy = self._ending = False
        self._task: asyncio.Task[None] | None = None
        run.branches.append(self)

    # --- the program's side

    def submit(self, expr: ir.Expr) -> None:
        """Queue an expression. Raises RuntimeError once the run has ended."""
        ops = [self._op(part) for part in expr.parts()]
        self._put(ops, wake=self.run.stream or not all(isinstance(op.expr, LAZY) for op in ops))

    def mark(self) -> Cell:
        """A cell that is set when everything queued so far is done, well or not."""
        if self._ending:
            return self.closed
        op = Op(Mark(), cell=Cell(self.run.loop))
        self._put([op], wake=True)
        assert op.cell is not None
        return op.cell

    def fork(self, count: int) -> list[Branch]:
        """Branches that share everything up to here. They can be written to at once."""
        made = [Branch(self.run, self) for _ in range(count)]
        self.children += made
        self._put([Op(ir.Fork(count=count), branches=made)], wake=True)
        return made

    def concatenate(self, branches: list[Branch]) -> None:
        """Append what these wrote since their fork, in order."""
        self._put([Op(ir.ConcatAndAppend(branches=len(branches)), branches=branches)], wake=True)

    def gather(self, branches: list[Branch]) -> None:
        """Variables that they have set become lists here, one entry per branch; reading one waits as ever."""
        own = [{n: c for n, c in branch.cells.items() if branch.inherited.get(n) is not c} for branch in branches]
        for name in {name: None for cells in own for name in cells}:
            self.run.start_task(gathered(self._register(name), [cells.get(name) for cells in own]))

    def variable(self, name: str) -> Cell:
        """The cell of a variable. Raises KeyError if there is none and will be none."""
        found = self.cells.get(name)
        if found is not None:
            self.wake()
            return found
        with self._lock:
            if self.run.over or self._ending or self.run.inside:
                known = ", ".join(self.cells) or "none"
                raise KeyError(f"{name!r}: the program has no such variable (it has: {known})")
            return self._expected.setdefault(name, Cell(self.run.loop))

    def assign(self, name: str, value: Any) -> None:
        """Set a variable from outside."""
        self._register(name).set(value)

    def wake(self) -> None:
        """Carry out what waits in the queue."""
        with self._lock:
            if self._working or not self._queue:
                return
            self._wanted = True
            if self._blocked:
                return
            self._working = True
        self.run.call(self._begin)

    def cancel(self, error: BaseException | None = None) -> None:
        """Stop this branch and those forked from it, from any thread; what they have not produced raises `error`."""
        why = error if error is not None else Cancelled("the branch was cancelled")
        self.run.call(lambda: self._cancel(why))

    def end(self) -> None:
        """Release what the branch holds when its queue is done. Idempotent."""
        with self._lock:
            if self._ending:
                return
        self._put([Op(End())], wake=True)

    # --- the queue

    def _put(self, ops: Iterable[Op], *, wake: bool) -> None:
        ops = list(ops)
        with self._lock:
            if self._ending:
                raise RuntimeError("this state has ended: its run is over, or its fork was joined; it can only be read")
            self._ending = isinstance(ops[-1].expr, End) if ops else False
            self._queue.extend(ops)
        if wake:
            self.wake()

    def _op(self, expr: ir.Expr) -> Op:
        op = Op(expr)
        if isinstance(expr, (ir.Gen, ir.Select, ir.ScopeBegin)):
            op.cell = self._register(expr.name)
        elif isinstance(expr, ir.ScopeEnd):
            op.cell = self.cells.get(expr.name)
        elif isinstance(expr, ir.SeparateReasoning):
            op.inner = [self._op(part) for part in expr.inner]
            for inner in op.inner:
                if isinstance(inner.expr, ir.Gen):
                    inner.thought = self._register(reasoning_name(inner.expr.name))
        return op

    def _register(self, name: str | None) -> Cell:
        """A new cell, in place of an older one of that name."""
        if name is None:
            return Cell(self.run.loop)
        with self._lock:
            cell = self._expected.pop(name) if name in self._expected else Cell(self.run.loop)
            self.cells[name] = cell
            return cell

    # --- on the loop

    def _begin(self) -> None:
        self._task = self.run.spawn(self._work())

    async def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._working = self._wanted = False
                    return
                op = self._queue.popleft()
            if isinstance(op.expr, (Mark, End)):
                await self._arrive(op)
            elif self.error is not None:
                self._skip(op)
            else:
                await self._attempt(op)

    async def _attempt(self, op: Op) -> None:
        try:
            if self._path is None:
                self._path = self.run.backend.start(**self.run.start)
            self._busy = True
            await self._execute(op, self._path)
        except asyncio.CancelledError:
            if self.error is None:  # not by `cancel`: the loop ends
                self.error = AbortedError("the event loop of the program has ended")
            self._skip(op)
            if self._path is not None:
                await self._path.close()
        except Exception as error:
            self.error = error
            self._skip(op)
        finally:
            self._busy = False

    async def _arrive(self, op: Op) -> None:
        if isinstance(op.expr, Mark):
            assert op.cell is not None
            op.cell.set(None)
            return
        try:
            if self._path is not None:
                await self._path.close()
        except Exception as error:
            self.error = self.error or error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            expected, self._expected = self._expected, {}
        for name, cell in expected.items():
            cell.fail(self.error or KeyError(f"{name!r}: the program ended without such a variable"))
        for cell in self._scoped:
            cell.fail(self.error or KeyError("the scope of this variable was never ended"))
        if self.error is not None:
            self.text.fail(self.error)
        else:
            self.text.set(None)
        self.closed.set(None)

    def _skip(self, op: Op) -> None:
        """What will not be done: its readers learn why."""
        assert self.error is not None
        for cell in (op.cell, op.thought):
            if cell is not None:
                cell.fail(self.error)
        for inner in op.inner:
            self._skip(inner)
        if isinstance(op.expr, ir.Fork):
            for branch in op.branches:
                branch._open(self, None)

    def _cancel(self, error: BaseException) -> None:
        for child in self.children:
            child._cancel(error)
        if self.closed.done or self.error is not None:
            return
        self.error = error
        if self._busy and self._task is not None:
            self._task.cancel()
        elif self._path is not None:
            self.run.spawn(self._path.close())
        self.wake()

    def _open(self, parent: Branch, path: Path | None) -> None:
        """The parent has come to the fork."""
        self._path = path
        self.error = self.error or parent.error
        text = parent.text.text()
        self.text.push(text)
        self.fork_start = len(text)
        self.messages = list(parent.messages)
        self._role, self._scopes = parent._role, dict(parent._scopes)
        with self._lock:
            self._blocked = False
            if not self._wanted or self._working:
                return
            self._working = True
        self._begin()

    # --- expressions

    async def _execute(self, op: Op, path: Path) -> None:
        expr = op.expr
        if isinstance(expr, ir.Gen):
            await self._generate(expr, op, path)
        elif isinstance(expr, ir.Select):
            selection = await path.select(expr.choices, expr.method, expr.temperature)
            self.write(selection.choice, op.cell)
            _cell(op).set(selection.choice, report(selection))
        elif isinstance(expr, ir.SeparateReasoning):
            self._path = await split_thoughts(self, expr, op, path)
        elif isinstance(expr, ir.Fork):
            for branch, fork in zip(op.branches, path.fork(expr.count), strict=True):
                branch._open(self, fork)
        elif isinstance(expr, ir.ConcatAndAppend):
            await self._concatenate(op, path)
        elif isinstance(expr, ir.CommitLazy):
            await path.commit()
        else:
            await self.note(expr, op, path)

    async def note(self, expr: ir.Expr, op: Op, path: Path) -> None:
        """What only adds text or notes a place."""
        if isinstance(expr, ir.Constant):
            path.append(expr.text)
            self.write(expr.text)
        elif isinstance(expr, ir.RoleBegin):
            if self._role is not None:
                raise RequestError(
                    f"a {expr.role} message begins inside a {self._role[0]} message", hint="messages cannot be nested"
                )
            self.write(path.begin(expr.role))
            self._role = expr.role, len(self.text.text())
        elif isinstance(expr, ir.RoleEnd):
            if self._role is None or self._role[0] != expr.role:
                raise RequestError(f"a {expr.role} message ends that has not begun")
            self.messages.append({"role": expr.role, "content": self.text.text()[self._role[1] :]})
            self._role = None
            self.write(path.end(expr.role))
        elif isinstance(expr, ir.ScopeBegin):
            self._scopes[expr.name] = len(self.text.text())
            self._scoped.append(_cell(op))
        elif isinstance(expr, ir.ScopeEnd):
            _cell(op).set(self.text.text()[self._scopes.pop(expr.name) :])
        elif isinstance(expr, ir.Variable):
            value = str(await self.cells[expr.name].aget())
            path.append(value)
            self.write(value)
        else:
            assert isinstance(expr, ir.Media), expr
            raise RequestError(
                f"{expr.what} needs a model with vision, which this backend does not have",
                hint="describe it in text, or use another backend",
                param=expr.what,
            )

    async def _generate(self, expr: ir.Gen, op: Op, path: Path) -> None:
        params, cell, streamed = self.params(expr), _cell(op), 0

        def on_text(delta: str) -> None:
            nonlocal streamed
            streamed += len(delta)
            self.write(delta, cell)

        generation = await path.generate(params, on_text if self.run.stream else None)
        self.write(generation.texts[0][streamed:], cell)
        self.report(expr, cell, generation, params)

    def params(self, expr: ir.Gen) -> SamplingParams:
        """The parameters of a gen: the run's, its own, and what its type asks for. Raises RequestError."""
        return SamplingParams(**typed({**self.run.defaults, **expr.given}, expr.dtype))

    def report(self, expr: ir.Gen, cell: Cell, generation: Generation, params: SamplingParams) -> None:
        """Fill a gen's cell: with a list where n is above 1."""
        start = self.run.logprob_start if expr.logprob_start is None else expr.logprob_start
        metas = [report(generation, i, start) for i in range(len(generation.texts))]
        if params.n == 1:
            cell.set(generation.texts[0], metas[0])
        else:
            cell.set(list(generation.texts), metas)

    async def _concatenate(self, op: Op, path: Path) -> None:
        for branch in op.branches:
            await branch.mark().ready()
            if isinstance(branch.error, Cancelled):
                continue  # a branch that was cancelled adds nothing
            if branch.error is not None:
                raise branch.error
            text = branch.text.text()[branch.fork_start :]
            path.append(text)
            self.write(text)

    def write(self, text: str, cell: Cell | None = None) -> None:
        """Add to the state's text, and to a variable's."""
        if text:
            self.text.push(text)
            if cell is not None:
                cell.push(text)


def _cell(op: Op) -> Cell:
    assert op.cell is not None
    return op.cell
