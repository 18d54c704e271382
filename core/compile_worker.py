"""How a constraint is compiled, and what the engine and a compile process say to each other.

A frame is eight bytes of length and that many bytes of msgpack. The engine sends a Setup and gets an Answer once the
backends are built. Then it sends Orders, the next when the last is answered or put aside, and gets exactly one Answer
for each, beside the one that says it was put aside; a GiveUp, at any time, makes it come at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .constraint import Constraint, Unenforced, exact
from .errors import RequestError
from .interfaces import Grammar, Matcher, PluginContext, TokenizerData
from .messages import ErrorInfo
from .model_spec import ModelSpec
from .registry import Registry, construct
from .tokenizer import Tokenizer

_DIALECTS = {"ebnf": "xgrammar", "lark": "llguidance"}  # whose own language a kind of constraint is
_SHOWN = 8  # things that one refusal lists
_SLOW_S = 0.5  # CPU seconds for one mask and one forced text, which the engine's loop would have to spend
_CHUNK = 1 << 20


class Choice(msgspec.Struct, frozen=True):
    """A backend as the configuration has it: the name requests use, what to load, and its options as plain data."""

    name: str
    use: str
    options: dict[str, Any] = {}


class Setup(msgspec.Struct):
    """What the process needs to build the backends, and what a compilation may take."""

    choices: list[Choice]
    tokenizer: TokenizerData
    model: ModelSpec
    memory: int  # bytes that one compilation may allocate
    timeout_s: float


class Order(msgspec.Struct, tag=True):
    """A constraint to compile, with the first of the named backends that can."""

    id: int
    names: Sequence[str]
    constraint: Constraint


class GiveUp(msgspec.Struct, tag=True):
    """Nobody waits for that order any more; ignored if it has been answered."""

    id: int


class Answer(msgspec.Struct):
    """What became of an order (of the setup: no error)."""

    id: int = 0
    backend: str = ""
    compiled: bytes = b""
    notes: list[str] = []
    error: ErrorInfo | None = None
    verdict: bool = False  # the error tells of the constraint; else of this attempt
    timeout: bool = False
    aside: bool = False  # no answer yet: it takes long, the next order may be sent


def build_backends(choices: Sequence[Choice], model: ModelSpec, tokenizer: Tokenizer) -> dict[str, Grammar]:
    """The backends by name, in order; the engine builds its own in the same way. Raises PluginError."""
    registry, backends = Registry(), dict[str, Grammar]()
    for choice in choices:
        plugin = registry.load("grammar", choice.use)
        context = PluginContext("grammar", choice.use, model=model, tokenizer=tokenizer)
        backends[choice.name] = construct("grammar", choice.use, plugin, plugin.Options(**choice.options), context)
    return backends


def compile_with(backends: Mapping[str, Grammar], names: Sequence[str], constraint: Constraint, vocab: int) -> Answer:
    """Compile with the first named backend that enforces all of the constraint, or, not `strict`, that compiles it.

    What it made is tried out. Raises RequestError saying what each lacks.
    """
    constraint, refusals = exact(constraint), list[RequestError]()
    for name in names:
        try:
            missing = _unenforced(backends, name, constraint)
            notes = [f"not enforced by {name}: {pointer}: {why}" for pointer, why in missing]
            compiled = backends[name].compile(constraint)
            _try_out(backends[name].matcher(constraint, compiled).fork(), name, constraint.kind, vocab)
            return Answer(0, name, compiled, notes)
        except RequestError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    reasons = "; ".join(f"{name}: {error.message}" for name, error in zip(names, refusals, strict=True))
    hint = "see the reasons; strict: false allows what a backend would let pass"
    raise RequestError(f"no backend can enforce this {constraint.kind}: {reasons}", hint=hint, param=constraint.kind)


def _unenforced(backends: Mapping[str, Grammar], name: str, constraint: Constraint) -> list[Unenforced]:
    """What the request has allowed the backend to let pass. Raises RequestError for more than that."""
    kind = constraint.kind
    others = [other for other, one in backends.items() if other != name and kind in one.capabilities]
    hint = f"grammar_backend: {others[0]!r}" if others else "`grammar: {use: auto}`, or `also: [llguidance]`"
    if kind not in backends[name].capabilities:
        owner = _DIALECTS.get(kind)
        whose = f" ({kind} is the dialect of {owner})" if owner else ""
        raise RequestError(f"{name} has no {kind}{whose}", hint=f"try another backend: {hint}", param=kind)
    missing = backends[name].unenforced(constraint)
    if missing and constraint.strict:
        listed = "; ".join(f"{pointer}: {why}" for pointer, why in missing[:_SHOWN])
        more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        hint = f"leave it out, try another backend ({hint}), or allow it with strict: false"
        raise RequestError(f"{name} cannot enforce all of this {kind}: {listed}{more}", hint=hint, param=kind)
    return missing


def _try_out(matcher: Matcher, name: str, kind: str, vocab: int) -> None:
    """One token's work; RequestError if the engine could not do it within a step."""
    begin = time.thread_time()
    matcher.fill(np.empty((vocab + 31) // 32, dtype=np.int32))
    matcher.forced()
    if (took := time.thread_time() - begin) > _SLOW_S:
        problem = f"{name} takes {took:.1f} s for one token under this {kind}"
        raise RequestError(problem, hint="simplify it, or use another grammar backend", param=kind)


# --- frames


def write_frame(pipe: int, data: bytes) -> None:
    """Write a whole frame; blocks while the pipe is full. Raises OSError if nobody reads."""
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(pipe, view) :]


def read_frame(pipe: int) -> bytes | None:
    """The next frame; None at the end of the pipe, also in the middle of a frame."""
    header = _read(pipe, 8)
    return _read(pipe, int.from_bytes(header, "little")) if header is not None else None


def _read(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(pipe, min(count - len(data), _CHUNK))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
