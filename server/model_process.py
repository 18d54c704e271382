"""One model process as its parent sees it: spawn, sockets, output, end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .wire import Boot, Failed, Message, Ready, Stop, decode_message, encode

WORKER = (sys.executable, "-m", "phloem.server.worker")
TAIL_LINES = 20
STOP_S = 5.0  # what a process gets to end by itself
LAST_WORDS_S = 1.0  # messages that a dying process sent before its end are still read for so long


async def spawn(command: Sequence[str] = WORKER) -> asyncio.subprocess.Process:
    """A child that imports what it will need and then waits for its boot message; it ends when its input does."""
    # On a terminal the child keeps it, for its progress bars; elsewhere its output is passed on and remembered.
    sink = None if sys.stderr.isatty() else asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink and asyncio.subprocess.STDOUT
    )


class ModelProcess:
    """Owns a child process and its two ipc sockets. `receive` gets every message but Failed, on the event loop."""

    def __init__(
        self,
        receive: Callable[[Message], None],
        command: Sequence[str] = WORKER,
        spawned: asyncio.subprocess.Process | None = None,
    ) -> None:
        """`spawned` is a child of `spawn` that has not been told anything yet; without it `run` makes one."""
        self._receive = receive
        self._command = command
        self._spawned = spawned
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._folder = Path(tempfile.mkdtemp(prefix="phloem-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._calls = self._context.socket(zmq.PUSH)
        self._events = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._wanted = True  # False once `stop` has been called, be it before the process exists
        self.failure: Failed | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, once it has been spawned."""
        return self._process.pid if self._process else None

    async def run(self, config: dict[str, Any], heartbeat_s: float) -> int:
        """Spawn, pass messages on until the process ends, and clean up; returns its exit status (-9: SIGKILL)."""
        addresses = [f"ipc://{self._folder / name}" for name in ("calls", "events")]
        for socket in (self._calls, self._events):
            socket.set_hwm(0)
            socket.linger = 0
        self._calls.connect(addresses[0])  # the sender connects, on both sides: it may queue before anyone listens
        self._events.bind(addresses[1])
        boot = Boot(calls=addresses[0], events=addresses[1], config=config, heartbeat_s=heartbeat_s)
        reader: asyncio.Task[None] | None = None
        relay: asyncio.Task[None] | None = None
        try:
            self._process = process = self._spawned or await spawn(self._command)
            assert process.stdin is not None
            if not self._wanted:
                process.kill()
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
            reader = asyncio.create_task(self._read())
            relay = asyncio.create_task(self._relay(process.stdout)) if process.stdout else None
            ended = asyncio.create_task(process.wait())
            await asyncio.wait({ended, reader}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # its messages cannot be understood: useless, and so would be the next one
                self.failure = Failed(f"{reader.exception()!r}", final=True)
                process.kill()
            status = await ended
            await asyncio.wait([task for task in (reader, relay) if task], timeout=LAST_WORDS_S)
            return status
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            for task in (reader, relay):
                if task is not None:
                    task.cancel()
            self._close()

    def send(self, data: bytes) -> None:
        """Queue a packed command. Never blocks: the queue is unbounded."""
        self._calls.send(data, zmq.NOBLOCK)

    async def stop(self) -> None:
        """Ask the process to end, and kill it when it does not or is still loading; `run` then returns."""
        self._wanted = False
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._ready:
            self.send(encode(Stop()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None:
            process.kill()

    def obituary(self, status: int) -> str:
        """How the process ended, for messages: its own words first, else the end of its output."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        text = f"the model process {how}"
        if self.failure is not None:
            return f"{text}: {self.failure.message.rstrip()}"
        tail = "\n".join(f"  | {line}" for line in self._tail)
        return f"{text}; the last lines of its output:\n{tail}" if tail else text

    async def _read(self) -> None:
        """Pass messages on until the process is gone and nothing is left to read."""
        while True:
            if self._process is not None and self._process.returncode is not None and not await self._events.poll(50):
                return
            if not await self._events.poll(500):
                continue
            message = decode_message(await self._events.recv())
            self._ready = self._ready or isinstance(message, Ready)
            if isinstance(message, Failed):
                self.failure = message
            else:
                self._receive(message)

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        """Copy the child's output to our standard error, line by line, and remember the end of it."""
        while line := await _line(stream):
            sys.stderr.write(line)
            sys.stderr.flush()
            self._tail.append(line.rstrip())

    def _close(self) -> None:
        self._events.close(linger=0)
        self._calls.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; a part of it where it is longer than the reader's buffer."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raw = error.partial
    except asyncio.LimitOverrunError as error:
        raw = await stream.readexactly(error.consumed)
    return raw.decode("utf-8", "replace")
