"""The engine's side of compiling: each compile process with its queue and two threads."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from .compile_worker import Answer, GiveUp, Order, Setup, read_frame, write_frame
from .constraint import Constraint
from .errors import PhloemError, RequestError
from .interfaces import Grammar, Matcher
from .writer import error_info

# What the parent can import the child can, and nothing else: not whatever lies in the working directory.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from phloem.compile_process import main; main()"


class Compiled(NamedTuple):
    """A constraint made ready: `matcher` stands at its start and is never advanced, requests get forks."""

    matcher: Matcher
    size: int  # bytes
    notes: list[str]


@dataclass(eq=False, slots=True)
class Job:
    """One constraint to compile. `done` is called once, on a thread of the pool; an Answer tells an error."""

    names: Sequence[str]
    constraint: Constraint
    done: Callable[[Compiled | Answer], None]
    id: int = 0
    given_up: bool = False
    lost: bool = False  # the process that had it was gone, once
    worker: _Worker | None = None

    def give_up(self) -> None:
        """Stop its compilation, which then fails. From any thread, at any time; does not wait."""
        self.given_up = True
        if self.worker is not None:
            self.worker.give_up(self)

    def fail(self, error: PhloemError) -> None:
        """It has no other answer."""
        self.done(Answer(error=error_info(error)))


class Process:
    """A compile process, started again when it is gone. Belongs to one thread, but for `receive` and `close`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> bool:
        """Wait until its backends are built; False if it runs already. Raises what they raised, or OSError."""
        if self._popen is not None:
            return False
        command = [sys.executable, "-I", "-c", _PROGRAM, *sys.path]
        with self._lock:
            if self._closed:
                raise OSError("the engine is closed")
            # A session of its own: Ctrl-C is the engine's to handle, and killing it reaches what it forked.
            self._popen = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
        self.send(self._setup)
        answer = self.receive()
        if answer.error is not None:
            self.stop()
            raise PhloemError(answer.error.message, hint=answer.error.hint)
        return True

    def send(self, data: bytes) -> None:
        """Write a frame; what is sent to a process that is gone is lost."""
        if (popen := self._popen) is not None and popen.stdin is not None:
            with suppress(OSError, ValueError):
                write_frame(popen.stdin.fileno(), data)

    def receive(self) -> Answer:
        """The next answer. Raises OSError if the process is gone."""
        assert self._popen is not None and self._popen.stdout is not None, "it has been started"  # noqa: PT018
        data = read_frame(self._popen.stdout.fileno())
        if data is None:
            raise OSError("the compile process ended")
        return msgspec.msgpack.decode(data, type=Answer)

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        with self._lock:
            if (popen := self._popen) is None:
                return
            self._kill()
            popen.wait()
            self._popen = None
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        """End it, for good; from any thread."""
        with self._lock:
            self._closed = True
            self._kill()

    def _kill(self) -> None:
        if self._popen is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)


class _Worker:
    """One compile process and what waits for it. A thread of its own runs whatever is put into the inbox.

    Another one reads the answers, as long as the process lives, and unpacks them.
    """

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], name: str) -> None:
        self._backends, self._process = backends, Process(setup)
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._open: dict[int, Job] = {}  # sent, not answered
        self._current: int | None = None  # the one sent last, until it is answered or put aside
        self._ids = itertools.count(1)
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, job: Job) -> None:
        """From any thread; does not wait."""
        job.id, job.worker = next(self._ids), self
        self._inbox.put(lambda: self._add(job))

    def give_up(self, job: Job) -> None:
        """From any thread; does not wait."""
        self._inbox.put(lambda: self._tell(GiveUp(job.id)) if job.id in self._open else None)

    def close(self) -> None:
        """Kill the process; jobs fail."""
        self._process.close()
        self._inbox.put(None)

    def _serve(self) -> None:
        while (work := self._inbox.get()) is not None:
            work()
        self._process.stop()
        for job in (*self._open.values(), *self._waiting):
            job.fail(PhloemError("the engine is closed"))

    def _add(self, job: Job) -> None:
        self._waiting.append(job)
        self._next()

    def _next(self) -> None:
        while self._current is None and self._waiting:
            job = self._waiting.popleft()
            if job.given_up:
                job.fail(PhloemError("nobody waits for this grammar any more"))
                continue
            try:
                if self._process.start():
                    threading.Thread(target=self._read, name="phloem-compiled", daemon=True).start()
            except (PhloemError, OSError) as error:
                job.fail(error if isinstance(error, PhloemError) else PhloemError(f"compiling failed: {error}"))
                continue
            self._current, self._open[job.id] = job.id, job
            self._tell(Order(job.id, job.names, job.constraint))

    def _tell(self, what: Order | GiveUp) -> None:
        self._process.send(msgspec.msgpack.encode(what))

    def _read(self) -> None:
        """Until the process ends."""
        with suppress(OSError, msgspec.MsgspecError):
            while True:
                answer = self._process.receive()
                job = self._open[answer.id] if answer.aside else self._open.pop(answer.id)
                self._inbox.put(partial(self._free, answer.id))
                if not answer.aside:
                    job.done(self._made(job, answer))
        self._inbox.put(self._ended)

    def _made(self, job: Job, answer: Answer) -> Compiled | Answer:
        if answer.error is not None:
            return answer
        try:
            matcher = self._backends[answer.backend].matcher(job.constraint, answer.compiled)
            return Compiled(matcher, len(answer.compiled), answer.notes)
        except RequestError as error:
            return Answer(error=error_info(error), verdict=True)
        except BaseException as error:  # a Rust library's panic is no Exception
            return Answer(error=error_info(PhloemError(f"compiling failed: {type(error).__name__}: {error}")))

    def _free(self, order: int) -> None:
        if self._current == order:
            self._current = None
            self._next()

    def _ended(self) -> None:
        """The process is gone: killed while it was idle, perhaps, which is no fault of any job."""
        self._process.stop()
        lost, self._current = list(self._open.values()), None
        self._open.clear()
        for job in reversed(lost):
            if job.lost:
                job.fail(PhloemError("compiling failed: the compile process ended"))
            else:
                job.lost = True
                self._waiting.appendleft(job)
        self._next()


class Compilers:
    """`workers` processes, each started by its first job.

    Not before: importing a backend's library takes seconds of CPU and hundreds of megabytes, which an engine that sees
    no constraint need not pay.
    """

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], workers: int) -> None:
        self._workers = [_Worker(setup, backends, f"phloem-compile-{i}") for i in range(workers)]
        self._turns = itertools.cycle(self._workers)

    def submit(self, job: Job) -> None:
        """Queue a job; does not wait."""
        next(self._turns).submit(job)

    def close(self) -> None:
        """Kill the processes; jobs fail."""
        for worker in self._workers:
            worker.close()
