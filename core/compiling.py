"""Compiles constraints in processes that may be killed: the libraries offer no way to cancel (design: isolation).

The engine holds one thread per process. A process ends when its standard input closes, so none outlives the engine.
"""

from __future__ import annotations

import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from .constraint import Constraint
from .errors import PhloemError, RequestError
from .interfaces import Grammar, Matcher, PluginContext, TokenizerData
from .model_spec import ModelSpec
from .registry import Registry
from .tokenizer import Tokenizer


class Choice(NamedTuple):
    """A backend as the configuration has it: what to load, and the options as plain data."""

    use: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process needs to build the backends."""

    backends: tuple[Choice, ...]
    tokenizer: TokenizerData
    model: ModelSpec
    memory: int  # bytes it may allocate beyond what its libraries took


class Compiled(NamedTuple):
    """A constraint made ready: `matcher` stands at its start and is never advanced, requests get forks."""

    matcher: Matcher
    size: int  # bytes
    notes: list[str]


def build_backends(setup: Setup) -> dict[str, Grammar]:
    """The backends by name, in order. Raises PluginError."""
    registry, tokenizer = Registry(), Tokenizer(setup.tokenizer)
    backends: dict[str, Grammar] = {}
    for use, options in setup.backends:
        plugin = registry.load("grammar", use)
        context = PluginContext("grammar", use, model=setup.model, tokenizer=tokenizer)
        backends[use] = plugin(plugin.Options(**options), context)
    return backends


def compile_with(
    backends: Mapping[str, Grammar], names: Sequence[str], constraint: Constraint
) -> tuple[str, bytes, list[str]]:
    """The first named backend that enforces all of a constraint, what it compiled, and what it will not enforce.

    With `strict` off the first one that compiles it. Raises RequestError saying what each lacks.
    """
    refusals: list[RequestError] = []
    for name in names:
        backend = backends[name]
        if constraint.kind not in backend.capabilities:
            able = [other for other, one in backends.items() if constraint.kind in one.capabilities]
            hint = f"grammar_backend: {able[0]}" if able else None
            refusals.append(RequestError(f"{name} has no {constraint.kind}", hint=hint, param=constraint.kind))
            continue
        try:
            missing = backend.unenforced(constraint)
            if missing and constraint.strict:
                listed = "; ".join(f"{pointer}: {why}" for pointer, why in missing[:8])
                raise RequestError(
                    f"{name} cannot enforce all of it: {listed}",
                    hint="leave these out, choose another backend (`grammar: {use: auto}`), or say strict: false",
                    param=constraint.kind,
                )
            notes = [f"not enforced by {name}: {pointer}: {why}" for pointer, why in missing]
            return name, backend.compile(constraint), notes
        except RequestError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise RequestError(
        f"no backend can enforce this {constraint.kind}: " + " | ".join(error.message for error in refusals),
        hint=refusals[0].hint,
        param=constraint.kind,
    )


@dataclass(eq=False, slots=True)
class Job:
    """One constraint to compile. `abort` may come from any thread, at any time."""

    constraint: Constraint
    names: tuple[str, ...]
    done: Future[Compiled] = field(default_factory=Future)
    why: RequestError | None = None  # why the process at work was killed
    process: subprocess.Popen[bytes] | None = None  # the one at work on it
    lock: threading.Lock = field(default_factory=threading.Lock)  # a late abort must not kill the next job's process

    def abort(self, why: RequestError) -> None:
        """Give the job up; a process that is at work on it is killed."""
        with self.lock:
            self.why = self.why or why
            if self.process is not None:
                self.process.kill()


class Compilers:
    """`workers` processes, started in the background, and the queue before them."""

    def __init__(self, setup: Setup, backends: Mapping[str, Grammar], workers: int, timeout_s: float) -> None:
        self._setup, self._backends, self._timeout_s = setup, backends, timeout_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = [
            threading.Thread(target=self._serve, name=f"phloem-compile-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; `job.done` gets its result on a thread of this pool."""
        self._jobs.put(job)

    def close(self) -> None:
        """Kill the processes; jobs at work fail."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for process in list(self._processes):
            process.kill()

    def _serve(self) -> None:
        process = self._start()
        while (job := self._jobs.get()) is not None and not self._closed:
            if process.poll() is not None:
                process = self._start()
            try:
                name, data, notes = self._ask(process, job)
                matcher = self._backends[name].matcher(job.constraint, data)
                job.done.set_result(Compiled(matcher, len(data), notes))
            except Exception as error:
                job.done.set_exception(error)
            if process.poll() is not None or job.why is not None:
                process.wait()
                self._forget(process)
                process = self._start()  # now, so that the next job need not wait for its imports
        process.kill()
        process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "phloem.compiling"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        if self._closed:
            process.kill()
        _send(process.stdin, self._setup)
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.remove(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, process: subprocess.Popen[bytes], job: Job) -> tuple[str, bytes, list[str]]:
        late = RequestError(
            f"compiling {job.constraint.kind} took longer than {self._timeout_s:g} s",
            hint="simplify it, or raise grammar.timeout_s",
            param=job.constraint.kind,
        )
        with job.lock:
            job.process = process
        timer = threading.Timer(self._timeout_s, job.abort, (late,))
        timer.daemon = True
        try:
            if job.why is None:
                _send(process.stdin, (job.constraint, job.names))
                assert process.stdout is not None
                ready = pickle.load(process.stdout)  # the start: not the job's time
                if isinstance(ready, Exception):
                    raise ready
                timer.start()
                answer = pickle.load(process.stdout)
                if isinstance(answer, Exception):
                    raise answer
                return answer  # type: ignore[no-any-return]
            raise job.why
        except (EOFError, OSError, pickle.UnpicklingError):
            raise job.why or self._death(process, job.constraint) from None
        finally:
            timer.cancel()
            with job.lock:
                job.process = None

    def _death(self, process: subprocess.Popen[bytes], constraint: Constraint) -> RequestError:
        code = process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RequestError(
            f"compiling {constraint.kind} ended its process ({how}): out of memory, or a fault of the library",
            hint="simplify it, or raise grammar.memory",
            param=constraint.kind,
        )


def _send(pipe: IO[bytes] | None, message: object) -> None:
    assert pipe is not None
    try:
        pickle.dump(message, pipe)
        pipe.flush()
    except OSError:
        pass  # the process has died: whoever reads its answer finds out


def _answer(backends: Mapping[str, Grammar], names: Sequence[str], constraint: Constraint) -> object:
    try:
        return compile_with(backends, names, constraint)
    except RequestError as error:
        return error
    except MemoryError:
        return RequestError(
            f"compiling {constraint.kind} needs more memory than allowed",
            hint="simplify it, or raise grammar.memory",
            param=constraint.kind,
        )
    except RecursionError:
        return RequestError(f"{constraint.kind} is nested too deeply", param=constraint.kind)
    except Exception as error:
        return PhloemError(f"the grammar backend failed: {type(error).__name__}: {error}")


def _limit_memory(extra: int) -> None:
    """Bound the address space to what the libraries took, and `extra`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))


def main() -> None:
    """The process: a setup, then jobs, pickled, on standard input; per job a sign of readiness and the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into the answers
    setup: Setup = pickle.load(sys.stdin.buffer)
    broken: Exception | None = None
    backends: Mapping[str, Grammar] = {}
    try:
        backends = build_backends(setup)
        if os.path.exists("/proc/self/statm"):
            _limit_memory(setup.memory)
    except Exception as error:
        broken = error if isinstance(error, PhloemError) else PhloemError(f"the grammar backend cannot start: {error}")
    while True:
        try:
            constraint, names = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(out, broken)
        if broken is None:
            _send(out, _answer(backends, names, constraint))


if __name__ == "__main__":
    main()
