"""What a trace is: a program's expressions in their places, as a graph that can be read, printed and drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ir

if TYPE_CHECKING:
    from .backends.base import Path as BackendPath

FORMATS: Mapping[str, str] = {".svg": "svg", ".mmd": "mermaid", ".mermaid": "mermaid"}
# What a program's beginning may consist of and still be the same text in every run.
_FIXED = (ir.Constant, ir.RoleBegin, ir.RoleEnd, ir.ScopeBegin, ir.ScopeEnd, ir.CommitLazy)


@dataclass(slots=True, eq=False)
class Node:
    """A node of a trace: an expression in its place.

    `before` comes first: in the same branch, or the fork that a branch begins at. `reads` are the nodes whose results
    this one uses. `line` is the line of the program that wrote it, as "file.py:12", where one is known.
    """

    id: int
    expr: ir.Expr
    branch: int
    before: Node | None = None
    reads: tuple[Node, ...] = ()
    line: str = ""

    def __str__(self) -> str:
        return f"{self.id} {describe(self.expr)}"


@dataclass(slots=True, eq=False)
class Graph:
    """A traced program: its nodes in the order in which the body wrote them. Branch 0 is the program's own state.

    Made by `Program.trace`; nothing changes it afterwards.
    """

    name: str
    arguments: tuple[str, ...]  # those whose values the trace did not know
    nodes: list[Node] = field(default_factory=list)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        """The listing: one line per node with its branch, what it follows, and what it reads."""
        branches = len({node.branch for node in self.nodes} | {0})
        rows = [("id", "branch", "after", "node", "reads")]
        for node in self.nodes:
            before = "-" if node.before is None else str(node.before.id)
            reads = " ".join(str(one.id) for one in node.reads)
            rows.append((str(node.id), str(node.branch), before, describe(node.expr), reads))
        wide = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:>{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:<{wide[3]}}  {row[4]}".rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.title}: {_count(len(self), 'node')}, {_count(branches, 'branch')}", *lines])

    @property
    def title(self) -> str:
        """The program with its open arguments, as it would be called."""
        return f"{self.name}({', '.join(self.arguments)})"

    def branches(self) -> dict[int, list[Node]]:
        """The nodes of each branch, in order; the program's own branch first, and there even if it is empty."""
        found: dict[int, list[Node]] = {0: []}
        for node in self.nodes:
            found.setdefault(node.branch, []).append(node)
        return found

    def prefix_nodes(self) -> list[Node]:
        """The nodes that every run begins with, whatever the arguments: text and roles up to the first unknown."""
        start = []
        for node in self.branches()[0]:
            if not isinstance(node.expr, _FIXED):
                break
            start.append(node)
        return start

    def prefix(self, path: BackendPath | None = None) -> str:
        """The constant text that every run begins with: what a batch can compute once.

        What a role adds is the model's matter: an empty `path` of the backend says it. Without one, and where a
        backend holds messages instead of text, the prefix ends before the first role.
        """
        parts: list[str] = []
        for node in self.prefix_nodes():
            match node.expr:
                case ir.Constant(text=text):
                    parts.append(text)
                    if path is not None:
                        path.append(text)
                case ir.RoleBegin(role=role) | ir.RoleEnd(role=role):
                    if path is None:
                        break
                    opens = isinstance(node.expr, ir.RoleBegin)
                    text = path.begin(role) if opens else path.end(role)
                    if opens and not text:
                        break
                    parts.append(text)
        return "".join(parts)

    def draw(self, path: str | PathLike[str] | None = None, *, format: str | None = None) -> str:
        """The graph as SVG or as Mermaid text, written to `path` if one is given; returns the text.

        `format` is "svg" or "mermaid"; without it the file's ending decides (.svg, .mmd), and SVG is the default.
        Raises ValueError for another format or ending.
        """
        from . import draw

        if format is None:
            suffix = ".svg" if path is None else Path(fspath(path)).suffix.lower()
            if suffix not in FORMATS:
                raise ValueError(f"cannot draw {path!r}: name a file ending in {', '.join(FORMATS)}, or give format")
            format = FORMATS[suffix]
        if format not in FORMATS.values():
            raise ValueError(f"cannot draw as {format!r}: the formats are svg and mermaid")
        text = draw.svg(self) if format == "svg" else draw.mermaid(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_svg_(self) -> str:
        """What notebooks show."""
        return self.draw()


def describe(expr: ir.Expr) -> str:
    """One line that says what an expression is: its kind, and what tells it from others of the kind."""
    match expr:
        case ir.Constant(text=text):
            detail = repr(text)
        case ir.Gen(name=name, given=given, dtype=dtype):
            detail = _words(name, dict(given) | ({} if dtype is None else {"dtype": dtype}))
        case ir.Select(name=name, choices=choices, method=method):
            detail = f"{_words(name, {'choices': list(choices)})} by {method}"
        case ir.Media(what=what, source=source):
            detail = f"{what} {source!r}"
        case ir.SeparateReasoning(parser=parser):
            detail = parser
        case ir.Fork(count=count):
            detail = _count(count, "branch")
        case ir.GetFork(index=index):
            detail = str(index)
        case ir.ConcatAndAppend(branches=branches):
            detail = _count(branches, "branch")
        case ir.RoleBegin(role=name) | ir.RoleEnd(role=name):
            detail = name
        case ir.Argument(name=name) | ir.Variable(name=name) | ir.ScopeBegin(name=name) | ir.ScopeEnd(name=name):
            detail = name
        case _:
            detail = ""
    return f"{expr.kind} {detail}".rstrip()


def _words(name: str | None, given: Mapping[str, Any]) -> str:
    """`name key=value ...`, without the name where there is none."""
    return " ".join([*([] if name is None else [name]), *(f"{key}={value!r}" for key, value in given.items())])


def _count(number: int, what: str) -> str:
    """`1 branch`, `2 branches`."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
