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

from phloem.errors import AbortedError

from . import ir
from .backends.base import Path
from .cell import Cancelled, Cell
from .execution import execute
from .gathering import gathered
from .reasoning import reasoning_name

if TYPE_CHECKING:
    from .run import Run

LAZY = (ir.Constant, ir.RoleBegin, ir.RoleEnd, ir.ScopeBegin, ir.ScopeEnd)


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
        self.role: tuple[str, int] | None = None  # the open message, and where its content begins
        self.scopes: dict[str, int] = {}  # open ones, and where their text begins
        self.scoped: list[Cell] = []
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
        self._task.add_done_callback(self._cut_short)

    def _cut_short(self, task: asyncio.Task[None]) -> None:
        """A loop that ends cancels tasks that have not begun; what is queued must be settled all the same."""
        if task.cancelled():
            self.error = self.error or AbortedError("the event loop of the program has ended")
            self._begin()

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
            self._path = await execute(self, op, self._path)
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
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            expected, self._expected = self._expected, {}
        for name, cell in expected.items():
            cell.fail(self.error or KeyError(f"{name!r}: the program ended without such a variable"))
        for cell in self.scoped:
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
                branch.open(self, None)

    def _cancel(self, error: BaseException) -> None:
        below = [self]
        for branch in below:  # grows: forks nest deeper than Python's stack
            below += branch.children
        for branch in reversed(below):
            branch._cancel_own(error)

    def _cancel_own(self, error: BaseException) -> None:
        if self.closed.done or self.error is not None:
            return
        self.error = error
        if self._busy and self._task is not None:
            self._task.cancel()
        elif self._path is not None:
            self.run.spawn(self._path.close())
        self.wake()

    def open(self, parent: Branch, path: Path | None) -> None:
        """The parent has come to the fork."""
        self._path = path
        self.error = self.error or parent.error
        text = parent.text.text()
        self.text.push(text)
        self.fork_start = len(text)
        self.messages = list(parent.messages)
        self.role, self.scopes = parent.role, dict(parent.scopes)
        with self._lock:
            self._blocked = False
            if not self._wanted or self._working:
                return
            self._working = True
        self._begin()

    def write(self, text: str, cell: Cell | None = None) -> None:
        """Add to the state's text, and to a variable's. On the loop."""
        if text:
            self.text.push(text)
            if cell is not None:
                cell.push(text)
