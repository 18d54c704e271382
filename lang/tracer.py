"""Traces a program: its body runs once, on a state that writes down what is appended and answers with symbols.

The state is the interpreter's own class over another kind of branch, so whatever a program can say can be traced. What
needs a value that only a run would have raises TraceError: see `phloem.lang.symbol`.

Python hides what it does with finished texts: a branch on an f-string, or `re.match` over a symbol, is not noticed
until something fails.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from phloem.errors import RequestError
from phloem.registry import did_you_mean

from . import ir
from .cell import Cell
from .graph import Graph, Node
from .reasoning import reasoning_name
from .state import State
from .symbol import Hole, Marks, Place, TraceError, is_programs, place, traced

if TYPE_CHECKING:
    from .interpreter import Branch
    from .program import Program

Expression = TypeVar("Expression", bound=ir.Expr)


def trace_program(program: Program, given: Mapping[str, Any], backend: Any = None) -> Graph:
    """The graph of a program. Arguments that are neither given nor have a default are symbols.

    Called by `Program.trace`. `backend` is SGLang's argument: a trace runs nothing and needs none. Raises TraceError
    for what needs an unknown value, RequestError for an argument that the program does not have, and what the body
    raises of itself.
    """
    del backend
    marks = Marks(program.__name__)
    arguments, unknown = _arguments(program, given, marks)
    graph = Graph(program.__name__, tuple(unknown))
    state = State(cast("Branch", TraceBranch(Trace(graph, marks))))
    try:
        with traced(marks):
            returned = program.func(state, **arguments)
            if inspect.iscoroutine(returned):
                _finish(returned)
    except TraceError:
        raise
    except Exception as error:
        raise marks.error or _explained(error, marks, unknown) from error
    if marks.error is not None:
        raise marks.error
    return graph


def _arguments(program: Program, given: Mapping[str, Any], marks: Marks) -> tuple[dict[str, Any], list[str]]:
    """The body's arguments by name, and those that are symbols."""
    parameters = list(inspect.signature(program.func).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in given:
        if name not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise RequestError(f"{program.__name__} has no argument {name!r} {did_you_mean(name, names)}", param=name)
    arguments, unknown = dict(given), []
    for parameter in parameters:
        if parameter.name in names and parameter.name not in given and parameter.default is parameter.empty:
            expr = ir.Argument(name=parameter.name)
            hole = Hole(f"the argument {parameter.name!r}", expr, argument=parameter.name)
            arguments[parameter.name] = marks.symbol(hole)
            unknown.append(parameter.name)
    return arguments, unknown


def _finish(body: Coroutine[Any, Any, Any]) -> None:
    """Run an async body to its end; nothing in it waits for the trace."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(body)
        return
    context = contextvars.copy_context()  # a loop runs in this thread already
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.run, asyncio.run, body).result()


def _explained(error: Exception, marks: Marks, unknown: list[str]) -> Exception:
    """The error of a body: as a TraceError if symbols had a part in it, as it is if they cannot have."""
    text = str(error)
    holes = marks.holes(text)
    if not holes and not unknown and not marks.used:
        return error
    trace, frame = error.__traceback__, None
    while trace is not None:
        if is_programs(trace.tb_frame):
            frame = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    where, said = frame or Place(), f"{type(error).__name__}: {marks.shown(text)}"
    if holes:
        return marks.failure(f"what failed with {said!r}", holes, where)
    more = f": trace({', '.join(f'{name}=...' for name in unknown)})" if unknown else ""
    return TraceError(
        f"tracing {marks.program}: the body failed with {said}{where.told()}",
        hint=f"perhaps because a trace does not know arguments and results; give more arguments{more}",
    )


class Trace:
    """What all branches of a trace share. `stream` is what `State` asks of a run."""

    stream = False

    def __init__(self, graph: Graph, marks: Marks) -> None:
        self.graph, self.marks = graph, marks
        self.branches = 0

    def branch(self) -> int:
        """The number of a new branch."""
        self.branches += 1
        return self.branches - 1


class TraceBranch:
    """One state of a trace: what `State` uses of the interpreter's `Branch`, with everything known at once."""

    def __init__(self, run: Trace, parent: TraceBranch | None = None) -> None:
        self.run = run
        self.number = run.branch()
        self.error: BaseException | None = None
        self.cells: dict[str, Cell] = dict(parent.cells) if parent is not None else {}
        self.messages: list[dict[str, Any]] = list(parent.messages) if parent is not None else []
        self.text: TraceText = TraceText(run.marks, parent.text.whole if parent is not None else "")
        self.last: Node | None = parent.last if parent is not None else None
        self._role: tuple[str, int] | None = parent._role if parent is not None else None
        self._scopes: dict[str, int] = dict(parent._scopes) if parent is not None else {}
        self._fork_start = len(self.text.whole)

    # --- what State calls

    def submit(self, expr: ir.Expr) -> None:
        """Write an expression down."""
        for part in expr.parts():
            self._record(part)

    def mark(self) -> Cell:
        """A place in the text: reached."""
        return Cell.of(None)

    def fork(self, count: int) -> list[TraceBranch]:
        """Branches, each beginning with its own node."""
        fork = self._add(ir.Fork(count=count))
        made = []
        for index in range(count):
            branch = TraceBranch(self.run, self)
            branch._add(ir.GetFork(index=index), before=fork)
            made.append(branch)
        return made

    def concatenate(self, branches: list[TraceBranch]) -> None:
        """What branches wrote is appended: a node that reads their ends."""
        ends = tuple(branch.last for branch in branches if branch.last is not None)
        self._add(ir.ConcatAndAppend(branches=len(branches)), reads=ends)
        self.text.whole += "".join(branch.text.whole[branch._fork_start :] for branch in branches)

    def gather(self, branches: list[TraceBranch]) -> None:
        """New variables become lists: known in length, their entries symbols."""
        names = dict.fromkeys(name for branch in branches for name in branch.cells if name not in self.cells)
        for name in names:
            cells = [branch.cells.get(name) for branch in branches]
            self.cells[name] = Cell.of([cell and cell.get() for cell in cells])
            self.cells[name].meta = [cell and cell.meta for cell in cells]

    def variable(self, name: str) -> Cell:
        """The cell of a variable. Raises KeyError if nothing before sets it."""
        if name not in self.cells:
            known = ", ".join(self.cells) or "none"
            raise KeyError(f"{name!r}: nothing before this sets such a variable (set are: {known})")
        self.run.marks.used = True
        return self.cells[name]

    def assign(self, name: str, value: Any) -> None:
        """Set a variable from outside."""
        self.cells[name] = Cell.of(value)

    def wake(self) -> None:
        """Nothing waits."""

    def cancel(self, error: BaseException | None = None) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """Nothing is held."""

    # --- nodes

    def _add(self, expr: ir.Expr, *, reads: tuple[Node, ...] = (), before: Node | None = None) -> Node:
        nodes = self.run.graph.nodes
        node = Node(len(nodes), expr, self.number, before or self.last, reads, place(sys._getframe(1)).short)
        nodes.append(node)
        self.last = node
        return node

    def _record(self, expr: ir.Expr) -> None:
        """One expression: nodes, text, variables."""
        match expr:
            case ir.Constant(text=text):
                self._write(text)
            case ir.Gen() | ir.Select():
                self._produce(expr)
            case ir.SeparateReasoning():
                self._separate(expr)
            case ir.RoleBegin() | ir.RoleEnd():
                self._speak(expr)
            case ir.ScopeBegin(name=name):
                self._add(expr)
                self._scopes[name] = len(self.text.whole)
            case ir.ScopeEnd(name=name):
                node, begin = self._add(expr), self._scopes.pop(name, 0)
                known = not self.run.marks.holes(self.text.whole[begin:])
                hole = Hole(f"the variable {name!r}", ir.Variable(name), (node,))
                self._set(name, node, self.text.whole[begin:] if known else self.run.marks.symbol(hole))
            case ir.Variable(name=name):
                self._write(str(self.variable(name).get()))
            case _:
                made, reads = self._resolved(expr)
                self._add(made, reads=reads)

    def _write(self, text: str) -> None:
        """Text with what stands in its holes: a node for each part."""
        for piece in self.run.marks.pieces(text):
            if isinstance(piece, Hole):
                self._add(piece.expr, reads=piece.reads)
            else:
                self._add(ir.Constant(piece))
        self.text.whole += str.__str__(text)

    def _produce(self, expr: ir.Gen | ir.Select) -> Node:
        made, reads = self._resolved(expr)
        node = self._add(made, reads=reads)
        values = self._values(expr.name or f"#{node.id}", node, expr)
        if expr.name is not None:
            self._set(expr.name, node, values)
        self.text.whole += str.__str__(values if isinstance(values, str) else values[0])
        return node

    def _separate(self, expr: ir.SeparateReasoning) -> None:
        """What is inside, then a node that tells thoughts from answers."""
        made: list[tuple[ir.Gen, Node]] = []
        for inner in expr.inner:
            self._record(inner)
            if isinstance(inner, ir.Gen) and self.last is not None:
                made.append((inner, self.last))
        node = self._add(replace(expr, inner=()), reads=tuple(gen for _, gen in made))
        for gen, _ in made:
            for name in (gen.name, reasoning_name(gen.name)):
                if name is not None:
                    self._set(name, node, self._values(name, node, gen))

    def _speak(self, expr: ir.RoleBegin | ir.RoleEnd) -> None:
        """A role's beginning or end. What text that is, only a backend knows."""
        node = self._add(expr)
        opens = isinstance(expr, ir.RoleBegin)
        if opens and self._role is not None:
            raise RequestError(
                f"a {expr.role} message begins inside a {self._role[0]} message", hint="messages cannot be nested"
            )
        if not opens and (self._role is None or self._role[0] != expr.role):
            raise RequestError(f"a {expr.role} message ends that has not begun")
        if not opens and self._role is not None:
            content = self.run.marks.known(self.text.whole[self._role[1] :])
            self.messages.append({"role": expr.role, "content": content})
        hole = Hole(f"what the role {expr.role} adds", ir.Variable(f"{expr.kind}({expr.role})"), (node,))
        self.text.whole += self.run.marks.symbol(hole).plain
        self._role = (expr.role, len(self.text.whole)) if opens else None

    def _values(self, name: str, node: Node, expr: ir.Gen | ir.Select) -> Any:
        """What a variable is: a symbol, or with `n` above 1 a list of them."""
        n = expr.given.get("n", 1) if isinstance(expr, ir.Gen) else 1
        names = [name] if n == 1 else [f"{name}[{place}]" for place in range(n)]
        made = [self.run.marks.symbol(Hole(f"the variable {name!r}", ir.Variable(one), (node,))) for one in names]
        return made[0] if n == 1 else made

    def _set(self, name: str, node: Node, value: Any) -> None:
        """A variable, and what is reported of it."""
        if self.run.marks.holes(name):
            raise self.run.marks.failure("a variable's name", self.run.marks.holes(name), place(sys._getframe(1)))
        cell = self.cells[name] = Cell.of(value)
        report = Hole(f"the report of {name!r}", ir.Variable(f"meta_info({name})"), (node,))
        cell.meta = self.run.marks.symbol(report)

    def _resolved(self, expr: Expression) -> tuple[Expression, tuple[Node, ...]]:
        """An expression with its holes written as `{name}`, and the nodes that they read."""
        reads: dict[Node, None] = {}

        def resolve(value: Any) -> Any:
            if isinstance(value, str):
                reads.update(dict.fromkeys(node for hole in self.run.marks.holes(value) for node in hole.reads))
                return self.run.marks.shown(value)
            if isinstance(value, (list, tuple)):
                return type(value)(map(resolve, value))
            if isinstance(value, Mapping):
                return {key: resolve(one) for key, one in value.items()}
            return value

        changed = {field.name: resolve(getattr(expr, field.name)) for field in fields(expr)}
        return replace(expr, **changed), tuple(reads)


class TraceText:
    """A branch's text, with marks; what `State` asks of the cell of a text."""

    meta = None

    def __init__(self, marks: Marks, whole: str) -> None:
        self._marks, self.whole = marks, whole

    def text(self) -> str:
        """All text so far, as programs may have it."""
        return self._marks.known(self.whole)
