"""Values that a trace does not know: texts that may be written into other texts, and nothing else.

A symbol is a `str` that holds a mark. Python lets it into f-strings, `+`, `%`, `.format` and `join` like any text, and
the tracer finds the mark again in what is appended. Whatever would need the value raises TraceError.
"""

from __future__ import annotations

import contextvars
import linecache
import re
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from phloem.errors import PhloemError

from . import ir

if TYPE_CHECKING:
    from .graph import Node

_STDLIB = sysconfig.get_paths()["stdlib"]  # frames of its modules, and of what is installed below, are nobody's program


_tracing: contextvars.ContextVar[Marks | None] = contextvars.ContextVar("phloem_lang_tracing", default=None)


class TraceError(PhloemError):
    """A program does something that needs a value which is not known while it is traced."""

    kind = "trace_error"


@dataclass(frozen=True, slots=True)
class Hole:
    """What a mark stands for: how to say it, the expression that shows it, and the nodes that produce it."""

    what: str  # "the argument 'topic'", "the variable 'tip'"
    expr: ir.Expr
    reads: tuple[Node, ...] = ()
    argument: str | None = None  # the argument that it comes from

    @property
    def name(self) -> str:
        """How the value would be written in the program's own words."""
        assert isinstance(self.expr, (ir.Argument, ir.Variable))
        return self.expr.name

    def derived(self, name: str) -> Hole:
        """The same origin under the name of an expression, as `topic.strip()`."""
        return replace(self, expr=replace(self.expr, name=name))  # type: ignore[call-arg]  # both have a name


class Marks:
    """The marks of one trace. They survive JSON, `repr` and changes of case, and occur in no other text."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.error: TraceError | None = None  # the first that was raised: a body may have swallowed it
        self.used = False  # the program has read something that only a run would know
        self._word = f"hole{secrets.token_hex(8)}"
        self._holes: list[Hole] = []
        self._pattern = re.compile(rf"{self._word}x(\d+)x", re.IGNORECASE)

    def symbol(self, hole: Hole) -> Symbol:
        """A symbol for a hole."""
        self._holes.append(hole)
        return Symbol(f"{self._word}x{len(self._holes) - 1}x", self)

    def known(self, text: str) -> str:
        """A text as programs may have it: a symbol if there are holes in it."""
        self.used = True
        return Symbol(text, self) if self._pattern.search(text) else text

    def pieces(self, text: str) -> Iterator[str | Hole]:
        """A text's parts, in order: constant ones and holes."""
        text, at = str.__str__(text), 0
        for found in self._pattern.finditer(text):
            if found.start() > at:
                yield text[at : found.start()]
            yield self._holes[int(found[1])]
            at = found.end()
        if at < len(text):
            yield text[at:]

    def holes(self, text: str) -> list[Hole]:
        """The holes in a text, each once."""
        return list(dict.fromkeys(piece for piece in self.pieces(text) if isinstance(piece, Hole)))

    def shown(self, text: str) -> str:
        """A text with `{name}` for each hole."""
        return "".join(piece if isinstance(piece, str) else f"{{{piece.name}}}" for piece in self.pieces(text))

    def failure(self, action: str, holes: list[Hole], where: Place) -> TraceError:
        """The error of something that needs holes' values."""
        what = " and ".join(dict.fromkeys(hole.what for hole in holes))
        message = (
            f"tracing {self.program}: {action} needs the value of {what}, which a trace does not know{where.told()}"
        )
        arguments = dict.fromkeys(hole.argument for hole in holes if hole.argument is not None)
        hint = "avoid it in what is traced: only a run knows what the model answers"
        if arguments:
            hint = f"give it: trace({', '.join(f'{name}=...' for name in arguments)}), or avoid this in what is traced"
        return self.keep(TraceError(message, hint=hint))

    def keep(self, error: TraceError) -> TraceError:
        """Remember the first error."""
        self.error = self.error or error
        return error


@contextmanager
def traced(marks: Marks) -> Iterator[None]:
    """What runs here is the body of a program that is traced."""
    token = _tracing.set(marks)
    try:
        yield
    finally:
        _tracing.reset(token)


def refuse_in_trace(program: str) -> None:
    """A run inside of a trace would send marks to a model: raises TraceError. Called when a run begins."""
    marks = _tracing.get()
    if marks is not None:
        raise marks.keep(
            TraceError(
                f"tracing {marks.program}: its body runs the program {program}{place(sys._getframe(1)).told()}",
                hint=f"go on in the same state, {program}(s, ...), or avoid the run in what is traced",
            )
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str = ""
    line: int = 0

    @property
    def short(self) -> str:
        """`file.py:12`, empty if nothing is known."""
        return f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}" if self.file else ""

    def told(self) -> str:
        """For messages: where it is, and what is written there."""
        if not self.file:
            return ""
        source = linecache.getline(self.file, self.line).strip()
        return f"\n  {self.file}:{self.line}" + (f": {source}" if source else "")


def place(frame: FrameType | None) -> Place:
    """The line of the program that a call comes from."""
    while frame is not None and not is_programs(frame):
        frame = frame.f_back
    return Place() if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def is_programs(frame: FrameType) -> bool:
    """Whether a frame is of the program, not of what runs it or of what it calls."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] != "phloem" and not frame.f_code.co_filename.startswith(_STDLIB)


class Symbol(str):
    """A text with marks in it. Items, attributes and methods that make one text of another give symbols again."""

    __slots__ = ("_marks",)
    _marks: Marks

    def __new__(cls, text: str, marks: Marks) -> Self:
        made = super().__new__(cls, str.__str__(text))
        made._marks = marks
        return made

    # --- texts of texts

    def __add__(self, other: Any) -> Any:
        return self._joined(other, lambda text: self.plain + text)

    def __radd__(self, other: Any) -> Any:
        return self._joined(other, lambda text: text + self.plain)

    def _joined(self, other: Any, join: Callable[[str], str]) -> Any:
        if isinstance(other, (int, float)):
            raise self._marks.failure("arithmetic", self._marks.holes(self), place(sys._getframe(2)))
        return Symbol(join(str.__str__(other)), self._marks) if isinstance(other, str) else NotImplemented

    def __rmod__(self, other: Any) -> Any:
        return Symbol(str.__mod__(other, self.plain), self._marks) if isinstance(other, str) else NotImplemented

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._derive(f"repr({self._name})").plain

    def __format__(self, spec: str) -> str:
        return self.plain if not spec else self._derive(f"{self._name}:{spec}").plain

    def __getitem__(self, key: Any) -> Symbol:
        if isinstance(key, slice):
            ends = ["" if end is None else str(end) for end in (key.start, key.stop, key.step)]
            return self._derive(f"{self._name}[{':'.join(ends if ends[2] else ends[:2])}]")
        return self._derive(f"{self._name}[{key!r}]")

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("_"):
            raise AttributeError(name)
        return Attribute(self._derive(f"{self._name}.{name}").plain, self._marks)

    @property
    def plain(self) -> str:
        """The text as an ordinary one, marks and all."""
        return str.__str__(self)

    @property
    def _name(self) -> str:
        return self._marks.shown(self.plain)

    def _derive(self, name: str) -> Symbol:
        """A symbol for an expression over this one; `name` says it."""
        holes = [*self._marks.holes(self.plain), *self._marks.holes(name)]
        reads = tuple(dict.fromkeys(node for hole in holes for node in hole.reads))
        name = self._marks.shown(name)
        if len(holes) == 1:  # the braces of a lone value say nothing
            name = name.replace(f"{{{holes[0].name}}}", holes[0].name, 1)
        return self._marks.symbol(replace(holes[0].derived(name), reads=reads))


class Attribute(Symbol):
    """An attribute of a symbol: perhaps a method, which nobody can call."""

    __slots__ = ()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self._marks.failure("a call", self._marks.holes(self), place(sys._getframe(1)))


def _refuse(name: str, action: str) -> Callable[..., Any]:
    """A method that fails, but in this package's own checks of what a program gives it: there a symbol is its text."""

    def refused(self: Symbol, *args: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__", "")).startswith("phloem."):
            return bool(self.plain) if name == "__bool__" else getattr(self.plain, name)(*args, **named)
        raise self._marks.failure(action, self._marks.holes(self), place(caller))

    return refused


def _of_text(name: str) -> Callable[..., Any]:
    """A method that makes a text of a text."""

    def derived(self: Symbol, *args: Any) -> Symbol:
        return self._derive(f"{self._name}.{name}({', '.join(map(repr, args))})")

    return derived


_TEXT_OF_TEXT = frozenset({"capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "lstrip"}) | frozenset(
    {"removeprefix", "removesuffix", "replace", "rjust", "rstrip", "strip", "swapcase", "title", "translate", "upper"}
)
_ACTIONS = {
    "__bool__": "a branch",
    "__len__": "len()",
    "__iter__": "a loop",
    "__contains__": "`in`",
    "__hash__": "a look-up",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "use as a number",
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), "a comparison"),
    **dict.fromkeys(("__mod__", "__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__"), "arithmetic"),
    **dict.fromkeys(("__floordiv__", "__rtruediv__", "__rfloordiv__", "__pow__", "__neg__", "__abs__"), "arithmetic"),
}
for _name in dir(str):
    if not _name.startswith("_"):
        setattr(Symbol, _name, _of_text(_name) if _name in _TEXT_OF_TEXT else _refuse(_name, f".{_name}()"))
for _name, _action in _ACTIONS.items():
    setattr(Symbol, _name, _refuse(_name, _action))
