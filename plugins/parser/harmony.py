"""gpt-oss: messages in channels, of which analysis is reasoning, and those with a recipient are calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phloem.interfaces import ParserStream, Tool

from ._call import Pair
from ._format import Form, Format
from ._parser import FormatParser
from ._source import Markers, Step, after
from ._stream import Stream
from ._tag import constraint

_START, _CHANNEL, _MESSAGE, _END, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_CONSTRAIN, _FUNCTIONS = "<|constrain|>", "functions."
_THOUGHT = f"{_CHANNEL}analysis{_MESSAGE}"
_NEXT = f"{_START}assistant"
_HEADS = Markers((_START, _CHANNEL))
_ENDS = Markers((_END, "<|return|>", _CALL, _START, _CHANNEL))  # the last two where a model forgot the end
_WORD = re.compile(r"[\w-]")
_RECIPIENT = re.compile(r"[\w.:/-]")
_LONGEST = 256
_CHANNELS = ("analysis", "commentary", "final")
_FORM = Form(
    begin=f"{_CHANNEL}commentary",
    opening=f" to={_FUNCTIONS}",
    body=Pair(f" {_CONSTRAIN}json{_MESSAGE}"),
    separator=f"{_CALL}{_NEXT}{_CHANNEL}commentary",
    stop=_CALL,
)
# In free text the recipient is what tells a call, on whichever side of the channel it stands.
_FREE = (
    replace(_FORM, begin="", marker=_FORM.opening),
    replace(_FORM, begin="", marker=_FORM.opening, body=Pair(f"{_CHANNEL}commentary {_CONSTRAIN}json{_MESSAGE}")),
)


class Harmony(FormatParser):
    """The harmony response format of gpt-oss. A call ends the answer there, so no answer has more than one.

    The end of a call, `<|call|>`, is an end-of-sequence token of these models. Source: openai/harmony, docs/format.md.
    """

    capabilities = frozenset({"tools", "reasoning"})
    format = Format(forms=(_FORM,), think=(_THOUGHT, f"{_END}{_NEXT}"), single=True)
    special = True

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the markers of messages."""
        return _CHANNEL in template and _MESSAGE in template

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> ParserStream:
        """A parser of one answer."""
        return HarmonyStream(calls=bool(tools), opened=self._opens(prompt))

    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        """At most one call, whatever `parallel` says."""
        chosen = replace(self.format, forms=_FREE) if choice == "auto" else self.format
        return constraint(chosen, tools, choice, parallel)


class Head(NamedTuple):
    """The header of a message."""

    channel: str
    recipient: str
    whole: bool  # False: this is none, or the answer ends in it


class HarmonyStream(Stream):
    """Reads message by message. Text outside of messages, and headers that are none, are content as they stand.

    Messages of one kind are joined with a line break. Without tools, calls are content as they stand.
    """

    def __init__(self, *, calls: bool, opened: bool) -> None:
        self._calls_known = calls
        self._opened = opened
        self._seen: set[str] = set()
        super().__init__()

    def machine(self) -> Step[None]:
        """Header and body in turn."""
        source = self.source
        if self._opened:
            yield from self._body("reasoning")
        while (yield from source.peek()):
            source.keep()
            head = yield from self._head()
            read = source.forget()
            if not head.whole:
                if read.strip() == _NEXT and not (yield from source.peek()):
                    break  # a message that was never begun
                self._text("content", read)
                yield from source.until(_HEADS, lambda text: self._text("content", text))
            elif head.recipient and self._calls_known:
                yield from self._call(head.recipient.removeprefix(_FUNCTIONS))
            elif head.recipient:
                yield from self._body("content", read)
            else:
                yield from self._body("reasoning" if head.channel == "analysis" else "content")

    def _head(self) -> Step[Head]:
        """A header up to its <|message|>, in any of the orders that the format allows."""
        source = self.source
        if (yield from source.try_take(_START)):
            yield from source.spaces()
            yield from source.word(_WORD, _LONGEST)
        recipient = yield from self._recipient()
        yield from source.spaces()
        if not (yield from source.try_take(_CHANNEL)):
            return Head("", recipient, False)
        yield from source.spaces()
        channel = yield from source.word(_WORD, _LONGEST)
        recipient = (yield from self._recipient()) or recipient
        yield from source.spaces()
        if (yield from source.try_take(_CONSTRAIN)):
            yield from source.spaces()
        yield from source.word(_WORD, _LONGEST)
        yield from source.spaces()
        return Head(channel, recipient, channel in _CHANNELS and (yield from source.try_take(_MESSAGE)))

    def _recipient(self) -> Step[str]:
        yield from self.source.spaces()
        if not (yield from self.source.try_take("to=")):
            return ""
        return (yield from self.source.word(_RECIPIENT, _LONGEST))

    def _body(self, kind: str, head: str = "") -> Step[None]:
        """A message of text, with its header where that is text, too."""
        write = after("\n" if kind in self._seen else "", lambda text: self._text(kind, text))
        write(head)
        yield from self.source.until(_ENDS, write)
        yield from self._ended()

    def _call(self, name: str) -> Step[None]:
        """A call: its whole body is the arguments."""
        self.pieces.call(name)
        before = self.pieces.calls
        yield from self.source.until(_ENDS, self.pieces.write)
        if self.pieces.calls == before:
            self.pieces.write("{}")
        yield from self._ended()

    def _ended(self) -> Step[None]:
        for end in (_END, "<|return|>", _CALL):
            if (yield from self.source.try_take(end)):
                return

    def _text(self, kind: str, text: str) -> None:
        self.pieces.text(kind, text)
        if text:
            self._seen.add(kind)
