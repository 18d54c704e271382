"""Grammar backends that misbehave as the constraint says: a regex that begins with `!` names what `compile` does."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError
from phloem.interfaces import PluginContext
from phloem.testing.toy_grammar import ToyGrammar, ToyMatcher

IN_ENGINE = "pytest" in sys.modules


class Panic(BaseException):
    """As pyo3 raises it for a library that panics: no Exception."""


class UnendingMatcher(ToyMatcher):
    """Cannot say whether it is complete."""

    def is_complete(self) -> bool:
        raise ArithmeticError("the end is lost")


class BrokenMatcher(ToyMatcher):
    """Cannot be copied in the engine, though it could where it was compiled."""

    def fork(self) -> ToyMatcher:
        if not IN_ENGINE:
            return super().fork()
        raise ArithmeticError("no copies")


class SlowMatcher(ToyMatcher):
    """Takes its time for a mask."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.6:
            pass
        super().fill(row)


def backtrack() -> None:
    """Two to the power of forty steps, inside C code that never lets go of the interpreter's lock."""
    re.fullmatch("(a|a)+", "a" * 40 + "b")


def spin() -> None:
    """Half a second of CPU."""
    begin = time.process_time()
    while time.process_time() - begin < 0.5:
        pass


def recurse() -> None:
    recurse()


def panic() -> None:
    raise Panic("index out of bounds")


def invalid() -> None:
    raise RequestError("this is no regex", hint="write one", param="regex")


def chatter() -> None:
    print("noise " * 10000, flush=True)
    os.write(1, b"\0" * 8)
    subprocess.run([sys.executable, "-c", "print('more noise')"], check=True)


DEEDS = {
    "backtrack": backtrack,
    "chatter": chatter,
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "invalid": invalid,
    "long": lambda: (_ for _ in ()).throw(RequestError("x" * 100_000, param="regex")),
    "eat": lambda: [bytearray(1 << 20) for _ in range(100_000)],
    "panic": panic,
    "recurse": recurse,
    "some": lambda: bytearray(50 << 20),
    "stdin": lambda: sys.stdin.buffer.read(),
    "zero": lambda: 1 / 0,
    "sleep": lambda: time.sleep(0.3),
    "spin": spin,
    "doze": lambda: time.sleep(30),
}


class Wild(ToyGrammar):
    """`!name pattern` does DEEDS[name], then compiles the pattern."""

    class Options(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        journal: str = ""
        """File that gets a line for each call of `compile`."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        super().__init__(ToyGrammar.Options(), context)
        self._journal = options.journal

    def compile(self, constraint: Constraint) -> bytes:
        if self._journal:
            with open(self._journal, "a") as file:
                file.write(f"{constraint.value}\n")
        deed, _, pattern = constraint.value.partition(" ")
        if not deed.startswith("!"):
            return super().compile(constraint)
        DEEDS[deed[1:]]()
        return pattern.encode()

    def matcher(self, constraint: Constraint, compiled: bytes) -> ToyMatcher:
        made = super().matcher(constraint, compiled)
        if constraint.value == "broken":
            made.__class__ = BrokenMatcher
        elif constraint.value == "endless":
            made.__class__ = UnendingMatcher
        elif constraint.value == "slow":
            made.__class__ = SlowMatcher
        elif constraint.value == "unreadable" and IN_ENGINE:
            raise UnicodeError("what is this?")
        return made


class Picky(ToyGrammar):
    """Takes JSON schemas too, as patterns; enforces no keyword but `pattern`."""

    capabilities = frozenset({"regex", "json_schema"})

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        names = re.findall(r'"(\w+)":', constraint.value) if constraint.kind == "json_schema" else []
        return [Unenforced(f"#/{name}", f"Picky ignores {name}") for name in names if name != "pattern"]

    def compile(self, constraint: Constraint) -> bytes:
        return b"[a-z]+"


class Liberal(Picky):
    """Enforces everything, but not regexes."""

    capabilities = frozenset({"json_schema"})

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        return []

    def compile(self, constraint: Constraint) -> bytes:
        return b"[0-9]+"


class Threaded(ToyGrammar):
    """Loads its library on a thread, and holds a lock meanwhile."""

    def __init__(self, options: ToyGrammar.Options, context: PluginContext) -> None:
        super().__init__(options, context)
        self._lock = threading.Lock()
        self._lock.acquire()
        threading.Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        time.sleep(0.3)
        self._lock.release()

    def compile(self, constraint: Constraint) -> bytes:
        with self._lock:
            return super().compile(constraint)


class Loaded(ToyGrammar):
    """Compiles only where the process that it was forked from has loaded it."""

    loaded = 0

    def load(self) -> None:
        self.loaded = os.getpid()

    def compile(self, constraint: Constraint) -> bytes:
        if self.loaded != os.getppid():
            raise RequestError(f"{self.loaded} has loaded it", param="regex")
        return super().compile(constraint)


class Unborn(ToyGrammar):
    """Fails to start in a compile process."""

    def __init__(self, options: ToyGrammar.Options, context: PluginContext) -> None:
        if not IN_ENGINE:
            raise MemoryError("no room")
        super().__init__(options, context)
