"""The language's intermediate representation: what a program appends to a state, and the graph that a trace is.

An expression is a value that a program writes (`gen("a") + "text"`); appended to a state it becomes a node. Nodes are
immutable descriptions: the interpreter executes them, the tracer links them into a `Graph`, and both see the same
types. The node kinds are those of SGLang's IR (arXiv:2312.07104, section 3 and the appendix on the compiler).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

from phloem.params import SamplingParams

Appendable = Union[str, int, float, "Expr"]


@dataclass(frozen=True, slots=True)
class Expr:
    """Something a program can append to a state. `+` joins expressions and texts, in order."""

    kind: ClassVar[str] = "expr"

    def __add__(self, other: Appendable) -> ExprList:
        return ExprList((*self.parts(), *lift(other).parts()))

    def __radd__(self, other: Appendable) -> ExprList:
        return ExprList((*lift(other).parts(), *self.parts()))

    def parts(self) -> tuple[Expr, ...]:
        """The expressions this one consists of, in order."""
        return (self,)


@dataclass(frozen=True, slots=True)
class ExprList(Expr):
    """Several expressions, appended one after another. Never nested: `parts` are flat."""

    items: tuple[Expr, ...] = ()
    kind: ClassVar[str] = "list"

    def parts(self) -> tuple[Expr, ...]:
        """The items."""
        return self.items

    def __iter__(self) -> Iterator[Expr]:
        return iter(self.items)


@dataclass(frozen=True, slots=True)
class Constant(Expr):
    """Text that is known when the node is made."""

    text: str = ""
    kind: ClassVar[str] = "constant"


@dataclass(frozen=True, slots=True)
class Argument(Expr):
    """A program's argument in a trace, where its value is not known: a hole in the text."""

    name: str = ""
    kind: ClassVar[str] = "argument"


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Generate text into the variable `name` (None: unnamed, the text still joins the state).

    `given` holds what the program set explicitly; `run`'s own sampling parameters are its defaults. `dtype` is "int",
    "float", "bool", "str" or None. `logprob_start` is the first token of the prompt whose logprob is reported.
    """

    name: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    logprob_start: int | None = None
    kind: ClassVar[str] = "gen"

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters of this call. Raises RequestError naming what is wrong."""
        return SamplingParams(**{**defaults, **self.given})


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Choose one of `choices` by the model's own probabilities; `method` is a name of `phloem.choosing`."""

    name: str | None = None
    choices: tuple[str, ...] = ()
    method: str = "token_length_normalized"
    temperature: float = 0.0
    kind: ClassVar[str] = "select"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """The opening of a message: the model's chat format says what text that is."""

    role: str = ""
    kind: ClassVar[str] = "role_begin"


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The end of a message."""

    role: str = ""
    kind: ClassVar[str] = "role_end"


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here on, appended text (generated too) is also the variable `name`'s."""

    name: str = ""
    kind: ClassVar[str] = "scope_begin"


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The end of a variable's scope; the variable is set then."""

    name: str = ""
    kind: ClassVar[str] = "scope_end"


@dataclass(frozen=True, slots=True)
class Media(Expr):
    """An image or a video: `what` says which. Refused unless the model declares vision."""

    what: str = "image"
    source: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "media"


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Of the text that `inner` generated, the thought goes to `<name>_reasoning_content`, the answer stays `<name>`.

    `parser` is a reasoning parser's name, or "auto" for the `<think>` convention.
    """

    inner: tuple[Expr, ...] = ()
    parser: str = "auto"
    kind: ClassVar[str] = "separate_reasoning"


@dataclass(frozen=True, slots=True)
class Fork(Expr):
    """The state splits into `count` branches that share everything before."""

    count: int = 1
    kind: ClassVar[str] = "fork"


@dataclass(frozen=True, slots=True)
class GetFork(Expr):
    """The beginning of branch `index` of a fork."""

    index: int = 0
    kind: ClassVar[str] = "get_fork"


@dataclass(frozen=True, slots=True)
class Variable(Expr):
    """A variable's value used as text: in a trace an edge from the node that sets it."""

    name: str = ""
    kind: ClassVar[str] = "variable"


@dataclass(frozen=True, slots=True)
class CommitLazy(Expr):
    """Text appended so far is handed to the engine now, though nobody waits for a result."""

    kind: ClassVar[str] = "commit_lazy"


@dataclass(frozen=True, slots=True)
class ConcatAndAppend(Expr):
    """`join("concate_and_append")`: what branches wrote since their fork is appended, in order."""

    branches: int = 0
    kind: ClassVar[str] = "concat_and_append"


def lift(value: Appendable) -> Expr:
    """An expression of a value that a program appends. Raises TypeError for what has no text."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, (str, int, float)):
        return Constant(str(value))
    raise TypeError(f"cannot append {type(value).__name__}: give text, a number, gen(...), select(...) or a role")


def message(role: str, expr: Appendable | None = None) -> ExprList:
    """A whole message of a role."""
    inner = () if expr is None else lift(expr).parts()
    return ExprList((RoleBegin(role=role), *inner, RoleEnd(role=role)))
