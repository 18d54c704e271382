"""The model process: `python -m phloem.server.worker`, started by the supervisor, boot message on standard input."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import zmq

from phloem.errors import PhloemError
from phloem.interfaces import ServiceInfo, TokenizerData
from phloem.messages import ErrorInfo, Event, GenerateCall
from phloem.registry import Registry

from .wire import Abort, Ask, Beat, Boot, Events, Failed, Message, Ready, Reply, Stop, Submit, decode_command, encode

if TYPE_CHECKING:
    from phloem.config import Config
    from phloem.loop import EngineCore

T = TypeVar("T")
STATS_WAIT_S = 0.02  # an idle loop answers at once
LINGER_MS = 2000  # how long an exiting process waits for its last words to be taken


class Core(Protocol):
    """What the model process needs of `phloem.loop.EngineCore`."""

    info: ServiceInfo
    tokenizer_data: TokenizerData
    progress: tuple[int, float]

    @property
    def busy(self) -> bool: ...
    def submit(self, call: GenerateCall) -> None: ...
    def abort(self, call_id: str) -> None: ...
    def invoke(self, function: Callable[[Any], T]) -> Future[T]: ...
    def run(self, emit: Callable[[list[Event]], None], ready: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...


class Sender:
    """One PUSH socket for all threads. It never blocks: the queue is unbounded, and the parent always reads."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        """Queue a message; any thread. After `close`, when a beat or an answer may still come, nothing."""
        data = encode(message)
        with self._lock:
            if not self._closed:
                self._socket.send(data)

    def close(self) -> None:
        """Flush and close."""
        with self._lock:
            self._closed = True
            self._socket.close()


Loaded = tuple[Core, str, dict[str, str]]  # the engine, its memory split, its plugins


def main(load: Callable[[dict[str, Any]], Loaded], prepare: Callable[[], None] = lambda: None) -> int:
    """Serve one model until told to stop; the exit status is 0 after that and 1 after a failure.

    `prepare` is called before the boot message is read, while the parent may still be reading its configuration.
    """
    _leave_signals()
    prepare()
    line = sys.stdin.buffer.readline()
    if not line:  # the parent has ended, or found its configuration wrong
        return 0
    boot = msgspec.json.decode(line, type=Boot)
    _follow_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, boot.events)
    try:
        core, memory, plugins = load(boot.config)

        def ready() -> None:
            gc.collect()
            gc.freeze()  # what is there now stays: looking through it again would hold up a step by 0.2 s
            sender.send(Ready(core.info, core.tokenizer_data, memory, plugins))
            threading.Thread(target=_read_commands, args=(context, boot.calls, core, sender), daemon=True).start()
            threading.Thread(target=_beat, args=(core, sender, boot.heartbeat_s), daemon=True).start()

        core.run(lambda events: sender.send(Events(events)), ready)
    except BaseException as error:
        user = isinstance(error, PhloemError)
        text = str(error) if user else "".join(traceback.format_exception(error)[-6:])
        sender.send(Failed(text, final=user))
        sender.close()
        context.term()
        return 1
    sender.close()
    return 0


def _leave_signals() -> None:
    """Signals meant for the whole group (Ctrl-C, a service manager's SIGTERM) are the parent's to handle: it drains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: works even while a step holds the GIL


def _follow_parent() -> None:
    """Never outlive the parent: end when standard input closes, where the kernel does not see to it."""

    def watch() -> None:
        while os.read(0, 4096):  # not through sys.stdin: its lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _read_commands(context: zmq.Context[zmq.Socket[bytes]], address: str, core: Core, sender: Sender) -> None:
    """Hand commands to the loop until Stop."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    while True:
        command = decode_command(socket.recv())
        if isinstance(command, Submit):
            core.submit(command.call)
        elif isinstance(command, Abort):
            core.abort(command.call_id)
        elif isinstance(command, Ask):
            _ask(core, sender, command)
        elif isinstance(command, Stop):
            core.stop()
            socket.close(linger=0)
            return


def _ask(core: Core, sender: Sender, ask: Ask) -> None:
    """Run a question on the loop's thread; its answer is sent from there."""

    def answer(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            sender.send(Reply(ask.ticket, done.result()))
        else:
            info = ErrorInfo(kind="internal_error", message=f"{type(error).__name__}: {error}", status=500)
            sender.send(Reply(ask.ticket, error=info))

    core.invoke(lambda inner: getattr(inner, ask.what)(*ask.arguments)).add_done_callback(answer)


def _beat(core: Core, sender: Sender, interval_s: float) -> None:
    """Send beats for ever. Statistics are asked for between steps; during a long one the last ones are repeated."""
    idle_at = time.monotonic()
    stats: dict[str, Any] = {}
    asked: Future[dict[str, Any]] = core.invoke(lambda inner: inner.stats())
    while True:
        if wait([asked], timeout=STATS_WAIT_S).done:
            stats = asked.result()
            asked = core.invoke(lambda inner: inner.stats())
        now = time.monotonic()
        steps, at = core.progress
        busy = core.busy
        idle_at = idle_at if busy else now
        sender.send(Beat(steps, now - max(at, idle_at) if busy else 0.0, stats))
        time.sleep(interval_s)


def _prepare() -> None:
    """Import what every engine needs; torch takes more than a second. What cannot be imported `_load` will tell."""
    with contextlib.suppress(ImportError):
        import phloem.assemble
        import phloem.config  # noqa: F401


def _load(config: dict[str, Any]) -> Loaded:
    """The real thing; imports torch."""
    from phloem.config import Config
    from phloem.loop import EngineCore

    resolved = Config.from_dict(config)
    core = EngineCore.from_config(resolved)
    return core, core.parts.memory, _chosen(resolved, core)


def _chosen(config: Config, core: EngineCore) -> dict[str, str]:
    """The plugins in use, by config section, for the banner; what `auto` came to is told by the objects."""
    executor = core.parts.executor
    auto: dict[str, type[Any]] = {"model": type(executor.model), "attention": type(executor.attention)}
    auto |= {"cache": type(core.parts.ledger.cache), "quant": type(core.parts.quant)}
    names = {(found.kind, found.target.partition(":")[2]): found.name for found in Registry().found()}
    single = {kind: names.get((kind, cls.__name__), cls.__name__) for kind, cls in auto.items()}
    single |= {"schedule": config.schedule.use, "grammar": config.grammar.use}
    single |= {"events": config.events.use, "storage": config.cache.disk.use}
    lists = {"spec": config.spec, "observers": config.observers, "samplers": config.samplers}
    return single | {name: ", ".join(s.use for s in sections) for name, sections in lists.items() if sections}


if __name__ == "__main__":
    sys.exit(main(_load, _prepare))
