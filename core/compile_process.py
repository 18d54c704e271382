"""The process in which constraints are compiled: it builds the backends once and forks for each constraint.

A compilation can then be killed (the libraries offer no way to cancel one) without losing what was imported, its memory
limit is its own, and what it leaks goes with it. This process never computes, so it always notices when the engine
gives a constraint up or is gone (the end of standard input).

Small constraints never wait for large ones. The engine sends one order at a time; a compilation that has used up
`_QUICK_S` is put aside, the engine is told so and sends the next. Aside, at most `_ASIDE` go on, only where a CPU is
idle; what finds no place there is killed and begins again when there is one, so that memory has a bound.

How hard a compilation competes with the engine: as its equal while `_HASTE_S` lasts, which all share and which comes
back slowly; hardly for the rest of its `_QUICK_S`, which is its own whatever others have spent; then not at all. On a
machine with an idle CPU none of this slows it down.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from .compile_worker import Answer, GiveUp, Order, Setup, build_backends, compile_with, read_frame, write_frame
from .errors import PhloemError, RequestError
from .interfaces import Grammar
from .tokenizer import Tokenizer
from .writer import error_info

_QUICK_S, _QUICK_WALL_S = 1.0, 10.0  # a compilation's own seconds of CPU, and seconds, before it is put aside
_HASTE_S, _HASTE_SHARE = 1.0, 0.003  # seconds of CPU as the engine's equal, at most and regained per second
_LAST = 19  # niceness: a hundredth of a contended CPU
_ASIDE = 2  # compilations that go on aside
_PATIENCE = 10  # times `timeout_s` on the clock: a machine that is busy is no fault of a constraint
_TICK_S = 0.05
_JOIN_S = 60.0  # for threads that a backend's constructor started: a process must not fork beside them
_LONGEST = 4000  # characters of an error: some quote the whole constraint
_CHUNK = 1 << 20


def main() -> None:
    """Serve one engine: `python -c "from phloem.compile_process import main; main()"`."""
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
        write_frame(out, msgspec.msgpack.encode(_refused(0, error)))
        return
    write_frame(out, msgspec.msgpack.encode(Answer()))
    _Desk(setup, backends, out).serve()


class _Compilation:
    """One order, in a process of its own."""

    def __init__(
        self, setup: Setup, backends: Mapping[str, Grammar], order: Order, out: int, niceness: int = 0
    ) -> None:
        self.order, self._timeout_s = order, setup.timeout_s
        self._begin, self._data = time.monotonic(), bytearray()
        self.pipe, end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.nice(niceness)
            os.close(out)  # else the engine would not see the end of a compile process that was killed
            _compile(end, setup, backends, order)
        os.close(end)

    @property
    def wall_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begin

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that it has used (on Linux; elsewhere `wall_s`)."""
        try:
            words = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return self.wall_s
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def slow_down(self, *, idle: bool) -> None:
        """All its threads, on Linux; `idle`: they run on idle CPUs only."""
        tasks = Path(f"/proc/{self._pid}/task")
        for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.exists() else [self._pid]:
            with suppress(OSError):  # the thread has ended
                os.setpriority(os.PRIO_PROCESS, task, _LAST)
                if idle and hasattr(os, "SCHED_IDLE"):
                    os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))

    def read(self) -> bool:
        """Take what it has written; False at the end."""
        chunk = os.read(self.pipe, _CHUNK)
        self._data += chunk
        return bool(chunk)

    def kill(self) -> int:
        """End it; its exit code, negative for a signal."""
        os.kill(self._pid, signal.SIGKILL)  # what it might still do is take its memory apart
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def late(self) -> str | None:
        """How it has used up its time, if it has."""
        if self.cpu_s > self._timeout_s:
            return f"took longer than {self._timeout_s:g} s"
        if self.wall_s > (most := _PATIENCE * self._timeout_s):
            return f"was not through after {most:g} s on a busy machine"
        return None

    def answer(self, late: str | None = None) -> bytes:
        """Kill it. The encoded Answer, whatever has happened."""
        code, data = self.kill(), self._data
        if late is None and len(data) >= 8 and len(data) - 8 == int.from_bytes(data[:8], "little"):
            return bytes(data[8:])
        kind, setting, why = self.order.constraint.kind, "timeout_s", late
        if why is None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            setting, why = "memory", f"ended its process ({how}): out of memory, or a fault of the library"
        hint = f"simplify it, or raise grammar.{setting}"
        answer = _refused(self.order.id, RequestError(f"compiling this {kind} {why}", hint=hint, param=kind))
        answer.timeout = late is not None
        return msgspec.msgpack.encode(answer)


class _Desk:
    """All orders of one compile process: the quick one, those aside, and those that wait for a place there."""

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], out: int) -> None:
        self._setup, self._backends, self._out = setup, backends, out
        self._decode = msgspec.msgpack.Decoder(Order | GiveUp).decode
        self._quick: _Compilation | None = None
        self._aside: list[_Compilation] = []
        self._waiting: deque[Order] = deque()
        self._haste, self._haste_at = _HASTE_S, time.monotonic()

    def serve(self) -> None:
        """Until the engine is gone, which shows where it is heard or where it is told something."""
        with suppress(BrokenPipeError):
            while self._turn():
                pass
        for one in self._running():
            one.kill()

    def _turn(self) -> bool:
        """Wait for whatever is next, and deal with it; False once the engine is gone."""
        running = self._running()
        poll = select.poll()
        for pipe in (0, *(one.pipe for one in running)):
            poll.register(pipe, select.POLLIN)
        ready = {pipe for pipe, _ in poll.poll(_TICK_S * 1000 if running else None)}
        for one in running:
            if one.pipe in ready and not one.read():
                self._end(one)
        if 0 in ready:
            if (data := read_frame(0)) is None:
                return False
            self._hear(self._decode(data))
        self._watch()
        return True

    def _running(self) -> list[_Compilation]:
        return [*self._aside, *([self._quick] if self._quick is not None else [])]

    def _hear(self, said: Order | GiveUp) -> None:
        if isinstance(said, Order):
            now = time.monotonic()
            self._haste = min(_HASTE_S, self._haste + (now - self._haste_at) * _HASTE_SHARE)
            self._haste_at = now
            self._quick = self._begin(said)
            return
        for order in self._waiting:
            if order.id == said.id:
                self._waiting.remove(order)
                self._say(_refused(said.id, PhloemError("given up")))
                return
        for one in self._running():
            if one.order.id == said.id:
                self._end(one)

    def _begin(self, order: Order) -> _Compilation:
        return _Compilation(self._setup, self._backends, order, self._out, 0 if self._haste > _TICK_S else _LAST)

    def _watch(self) -> None:
        """What has used up its time ends, or steps aside."""
        for one in self._running():
            if (late := one.late()) is not None:
                self._end(one, late)
        if (quick := self._quick) is None:
            return
        if (used := quick.cpu_s) >= _QUICK_S or quick.wall_s >= _QUICK_WALL_S:
            self._step_aside(quick)
        elif used >= self._haste:
            quick.slow_down(idle=False)

    def _step_aside(self, one: _Compilation) -> None:
        self._spend(one)
        self._quick = None
        if len(self._aside) < _ASIDE:
            one.slow_down(idle=True)
            self._aside.append(one)
        else:
            one.kill()
            self._waiting.append(one.order)
        self._say(Answer(one.order.id, aside=True))

    def _end(self, one: _Compilation, late: str | None = None) -> None:
        if one is self._quick:
            self._spend(one)
            self._quick = None
        else:
            self._aside.remove(one)
        write_frame(self._out, one.answer(late))
        if self._waiting and len(self._aside) < _ASIDE:
            self._aside.append(self._begin(self._waiting.popleft()))
            self._aside[-1].slow_down(idle=True)

    def _spend(self, quick: _Compilation) -> None:
        self._haste = max(0.0, self._haste - quick.cpu_s)

    def _say(self, answer: Answer) -> None:
        write_frame(self._out, msgspec.msgpack.encode(answer))


def _compile(pipe: int, setup: Setup, backends: Mapping[str, Grammar], order: Order) -> NoReturn:
    """The life of the forked process."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kind = order.constraint.kind
        try:
            _limit(setup.memory)
            answer = compile_with(backends, order.names, order.constraint, setup.model.vocab_size)
            answer.id = order.id
        except RequestError as error:
            answer = _refused(order.id, error, verdict=True)
        except RecursionError:
            deep = RequestError(f"this {kind} is nested too deeply", param=kind)
            answer = _refused(order.id, deep, verdict=True)
        except BaseException as error:  # a Rust library's panic is no Exception
            if isinstance(error, MemoryError) or "std::bad_alloc" in str(error):
                problem = f"compiling this {kind} takes more memory than the {setup.memory} bytes allowed"
                short = RequestError(problem, hint="simplify it, or raise grammar.memory", param=kind)
                answer = _refused(order.id, short)
            else:
                problem = f"the grammar backend failed: {type(error).__name__}: {error}"
                answer = _refused(order.id, PhloemError(problem))
        write_frame(pipe, msgspec.msgpack.encode(answer))
        os.close(pipe)  # now: taking the memory apart takes a while
    finally:
        os._exit(1)


def _refused(order: int, error: Exception, *, verdict: bool = False) -> Answer:
    info = error_info(error)
    info.message = info.message[:_LONGEST]
    return Answer(order, error=info, verdict=verdict)


def _limit(memory: int) -> None:
    """Bound what this process allocates from now on (Linux), and make it the first to go when the machine is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[5]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        Path("/proc/self/oom_score_adj").write_text("1000")
