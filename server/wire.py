"""Messages between the HTTP process and the model process: msgpack of msgspec structs, over two ipc sockets."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from phloem.interfaces import ServiceInfo, TokenizerData
from phloem.messages import ErrorInfo, Event, GenerateCall


class Boot(msgspec.Struct, kw_only=True):
    """First line of the model process's standard input; the stream stays open as long as the parent lives."""

    calls: str  # ipc address to bind and pull commands from
    events: str  # ipc address to connect to and push messages to
    config: dict[str, Any]
    heartbeat_s: float


# --- to the model process


class Submit(msgspec.Struct, tag=True):
    """Run a call."""

    call: GenerateCall


class Abort(msgspec.Struct, tag=True):
    """Cancel exactly this call."""

    call_id: str


class Ask(msgspec.Struct, tag=True):
    """Do something between two steps and answer with a Reply."""

    ticket: int
    what: Literal["stats", "flush_cache", "check", "drop_hold", "unpin"]
    arguments: list[str] = []


class Stop(msgspec.Struct, tag=True):
    """End after the present step."""


Command = Submit | Abort | Ask | Stop


# --- from the model process


class Ready(msgspec.Struct, tag=True):
    """The model is loaded; sent once."""

    info: ServiceInfo
    tokenizer: TokenizerData
    memory: str  # the memory split with its arithmetic
    plugins: dict[str, str]  # "cache.radix" -> version


class Events(msgspec.Struct, tag=True):
    """Events of one step, in order."""

    events: list[Event]


class Beat(msgspec.Struct, tag=True):
    """Sign of life, sent at a fixed interval by a thread of its own, also during a long step."""

    steps: int
    stalled_s: float  # seconds for which work has been pending without a finished step
    stats: dict[str, Any]  # as of the last moment between two steps


class Reply(msgspec.Struct, tag=True):
    """Answer to an Ask."""

    ticket: int
    value: Any = None
    error: ErrorInfo | None = None


class Failed(msgspec.Struct, tag=True):
    """The process cannot go on, and why. `final`: trying again would fail the same way."""

    message: str
    final: bool = False


Message = Ready | Events | Beat | Reply | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
