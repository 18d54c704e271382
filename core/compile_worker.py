"""The process in which constraints are compiled: it builds the backends once and forks for each constraint.

A compilation can then be killed (the libraries offer no way to cancel one) without losing what was imported, its memory
limit is its own, and what it leaks goes with it. This process never computes, so it always notices when the engine
gives a constraint up (an empty frame) or is gone (the end of standard input).

A frame is eight bytes of length and that many bytes of msgpack. The engine sends a Setup and gets an Answer once the
backends are built; then it sends one Order at a time and gets exactly one Answer for each.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from .constraint import Constraint, Unenforced, exact
from .errors import PhloemError, RequestError
from .interfaces import Grammar, Matcher, PluginContext, TokenizerData
from .messages import ErrorInfo
from .model_spec import ModelSpec
from .registry import Registry, construct
from .tokenizer import Tokenizer
from .writer import error_info

_DIALECTS = {"ebnf": "xgrammar", "lark": "llguidance"}  # whose own language a kind of constraint is
_SHOWN = 8  # things that one refusal lists
_SLOW_S = 0.5  # CPU seconds for one mask and one forced text, which the engine's loop would have to spend
_JOIN_S = 60.0  # for threads that a backend's constructor started: a process must not fork beside them
_HASTE_S, _HASTE_SHARE = 2.0, 0.01  # compiling beside the engine as its equal, at most and regained per second
_LONGEST = 4000  # characters of an error: some quote the whole constraint
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


class Order(msgspec.Struct):
    """A constraint to compile, with the first of the named backends that can."""

    names: Sequence[str]
    constraint: Constraint


class Answer(msgspec.Struct):
    """What became of an order (of the setup: no error)."""

    backend: str = ""
    compiled: bytes = b""
    notes: list[str] = []
    error: ErrorInfo | None = None
    verdict: bool = False  # the error tells of the constraint; else of this attempt
    timeout: bool = False


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
            return Answer(name, compiled, notes)
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


# --- the process


def main() -> None:
    """Serve one engine: `python -c "from phloem.compile_worker import main; main()"`."""
    out = os.dup(1)
    os.dup2(2, 1)  # libraries that print must not write into the answers
    if (data := read_frame(0)) is None:
        return
    setup = msgspec.msgpack.decode(data, type=Setup)
    try:
        backends = build_backends(setup.choices, setup.model, Tokenizer(setup.tokenizer))
        for backend in backends.values():
            if (load := getattr(backend, "load", None)) is not None:
                load()  # else every fork would import it again
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
    except Exception as error:
        write_frame(out, _encoded(error))
        return
    write_frame(out, msgspec.msgpack.encode(Answer()))
    haste, idle_since = _HASTE_S, time.monotonic()
    while (data := read_frame(0)) is not None:
        if not data:
            continue  # the order given up was answered already
        begin = time.monotonic()
        haste = min(_HASTE_S, haste + (begin - idle_since) * _HASTE_SHARE)
        answer = _Compilation(setup, backends, msgspec.msgpack.decode(data, type=Order), haste).answer()
        idle_since = time.monotonic()
        haste = max(0.0, haste - (idle_since - begin))
        if answer is None:
            return
        write_frame(out, answer)


class _Compilation:
    """One order, in a process of its own; after `haste` seconds it runs only where the engine leaves a CPU idle."""

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], order: Order, haste: float) -> None:
        self._what, self._timeout_s, self._haste = f"compiling this {order.constraint.kind}", setup.timeout_s, haste
        self._param = order.constraint.kind
        self._pipe, end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _compile(end, setup, backends, order)
        os.close(end)

    def answer(self) -> bytes | None:
        """The encoded Answer, whatever happens; None if the engine is gone."""
        data, stopped = self._wait()
        os.kill(self._pid, signal.SIGKILL)  # what it might still do is take its memory apart
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._pipe)
        if stopped == "gone":
            return None
        if stopped == "late":
            problem = f"{self._what} took longer than {self._timeout_s:g} s"
            return self._refusal(problem, "simplify it, or raise grammar.timeout_s", timeout=True)
        if stopped or len(data) < 8 or len(data) - 8 != int.from_bytes(data[:8], "little"):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            problem = f"{self._what} ended its process ({how}): out of memory, or a fault of the library"
            return self._refusal(problem, "simplify it, or raise grammar.memory")
        return bytes(data[8:])

    def _wait(self) -> tuple[bytearray, str]:
        """What the process wrote until it was through, and why it was not waited for any longer."""
        begin, data = time.monotonic(), bytearray()
        poll = select.poll()
        for pipe in (0, self._pipe):
            poll.register(pipe, select.POLLIN)
        for limit in (min(self._haste, self._timeout_s), self._timeout_s):
            while ready := [pipe for pipe, _ in poll.poll(max(0.0, begin + limit - time.monotonic()) * 1000)]:
                if 0 in ready:  # the engine gives it up, or ended
                    return data, "gone" if read_frame(0) is None else "given up"
                if not (chunk := os.read(self._pipe, _CHUNK)):
                    return data, ""
                data += chunk
            os.setpriority(os.PRIO_PROCESS, self._pid, 19)
        return data, "late"

    def _refusal(self, problem: str, hint: str, timeout: bool = False) -> bytes:
        return _encoded(RequestError(problem, hint=hint, param=self._param), timeout=timeout)


def _compile(pipe: int, setup: Setup, backends: Mapping[str, Grammar], order: Order) -> NoReturn:
    """The life of the forked process."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kind = order.constraint.kind
        try:
            _limit(setup.memory)
            answer = msgspec.msgpack.encode(
                compile_with(backends, order.names, order.constraint, setup.model.vocab_size)
            )
        except RequestError as error:
            answer = _encoded(error, verdict=True)
        except RecursionError:
            answer = _encoded(RequestError(f"this {kind} is nested too deeply", param=kind), verdict=True)
        except BaseException as error:  # a Rust library's panic is no Exception
            if isinstance(error, MemoryError) or "std::bad_alloc" in str(error):
                problem = f"compiling this {kind} takes more memory than the {setup.memory} bytes allowed"
                answer = _encoded(RequestError(problem, hint="simplify it, or raise grammar.memory", param=kind))
            else:
                answer = _encoded(PhloemError(f"the grammar backend failed: {type(error).__name__}: {error}"))
        write_frame(pipe, answer)
        os.close(pipe)  # now: taking the memory apart takes a while
    finally:
        os._exit(1)


def _encoded(error: Exception, *, verdict: bool = False, timeout: bool = False) -> bytes:
    info = error_info(error)
    info.message = info.message[:_LONGEST]
    return msgspec.msgpack.encode(Answer(error=info, verdict=verdict, timeout=timeout))


def _limit(memory: int) -> None:
    """Bound what this process allocates from now on (Linux), and make it the first to go when the machine is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[5]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        Path("/proc/self/oom_score_adj").write_text("1000")
