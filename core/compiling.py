"""The engine's side of compiling: a thread per compile process, and the queue before them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from .compile_worker import Answer, Order, Setup, read_frame, write_frame
from .errors import PhloemError, RequestError
from .interfaces import Grammar, Matcher
from .writer import error_info

# What the parent can import the child can, and nothing else: not whatever lies in the working directory.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from phloem.compile_worker import main; main()"


class Compiled(NamedTuple):
    """A constraint made ready: `matcher` stands at its start and is never advanced, requests get forks."""

    matcher: Matcher
    size: int  # bytes
    notes: list[str]


@dataclass(eq=False, slots=True)
class Job:
    """One constraint to compile. `done` is called once, on a thread of the pool; an Answer tells an error."""

    order: Order
    done: Callable[[Compiled | Answer], None]
    _given_up: bool = False
    _process: Process | None = None  # the one at work on it
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self) -> None:
        """Stop its compilation, which then fails. From any thread, at any time; does not wait."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.send(b"")

    def run(self, process: Process) -> Answer:
        """Have it compiled. Raises OSError if the process is gone."""
        with self._lock:  # held while it is sent: a late `give_up` must meet this job, not the next one
            if self._given_up:
                return Answer(error=error_info(PhloemError("nobody waits for this grammar any more")))
            process.send(msgspec.msgpack.encode(self.order))
            self._process = process
        try:
            return process.receive()
        finally:
            with self._lock:
                self._process = None


class Process:
    """A compile process, started again when it is gone. Belongs to one thread, but for `send` and `close`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Wait until its backends are built, if it does not run. Raises what they raised, or OSError."""
        if self._popen is not None:
            return
        command = [sys.executable, "-I", "-c", _PROGRAM, *sys.path]
        with self._lock:
            if self._closed:
                raise OSError("the engine is closed")
            # A session of its own: Ctrl-C is the engine's to handle, and killing it reaches what it forked.
            self._popen = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        self.send(self._setup)
        answer = self.receive()
        if answer.error is not None:
            self.stop()
            raise PhloemError(answer.error.message, hint=answer.error.hint)

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


class Compilers:
    """`workers` processes, each started by its first job, and the queue before them.

    Not before: importing a backend's library takes seconds of CPU and hundreds of megabytes, which an engine that sees
    no constraint need not pay.
    """

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], workers: int) -> None:
        self._backends = backends
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._processes = [Process(setup) for _ in range(workers)]
        for i, process in enumerate(self._processes):
            threading.Thread(target=self._serve, args=(process,), name=f"phloem-compile-{i}", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Kill the processes; jobs at work fail."""
        for process in self._processes:
            self._jobs.put(None)
            process.close()

    def _serve(self, process: Process) -> None:
        while (job := self._jobs.get()) is not None:
            job.done(self._compiled(process, job))
        process.stop()

    def _compiled(self, process: Process, job: Job) -> Compiled | Answer:
        try:
            try:
                process.start()
                answer = job.run(process)
            except OSError:  # it was killed while idle, perhaps: no fault of the job
                process.stop()
                process.start()
                answer = job.run(process)
            if answer.error is not None:
                return answer
            matcher = self._backends[answer.backend].matcher(job.order.constraint, answer.compiled)
            return Compiled(matcher, len(answer.compiled), answer.notes)
        except RequestError as error:
            return Answer(error=error_info(error), verdict=True)
        except PhloemError as error:
            return Answer(error=error_info(error))
        except Exception as error:
            process.stop()
            return Answer(error=error_info(PhloemError(f"compiling failed: {type(error).__name__}: {error}")))
