"""The stream of one answer: thoughts, content and calls, by the definition of a format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phloem.interfaces import Piece, Tool

from ._format import Form, Format
from ._source import Markers, Source, Step
from ._tag import starts


class Pieces:
    """What has been read and not handed out. It is also where a call goes while it is read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._made: list[tuple[str, int, list[str]]] = []
        self._name: str | None = None  # of a call that has not begun
        self.calls = 0

    def text(self, kind: str, text: str, call: int = 0) -> None:
        """More of a kind; nothing where the text is empty."""
        if not text:
            return
        if self._made and kind != "call" and self._made[-1][:2] == (kind, call):
            self._made[-1][2].append(text)
        else:
            self._made.append((kind, call, [text]))

    def call(self, name: str) -> None:
        """A call of this name begins with the first text of its arguments."""
        self._name = name

    def write(self, text: str) -> None:
        """Text of the call's arguments; with the first, the call is certain. Only what is read from here on is kept."""
        if not text:
            return
        self._source.keep()
        if self._name is not None:
            self.text("call", self._name, self.calls)
            self._name = None
            self.calls += 1
        self.text("arguments", text, self.calls - 1)

    def drain(self) -> list[Piece]:
        """Everything, which is handed out now."""
        made, self._made = self._made, []
        return [Piece(kind, "".join(texts), call) for kind, call, texts in made]


class Stream:
    """What all streams are: a machine that reads a source to its end."""

    def __init__(self) -> None:
        self.source = Source()
        self.pieces = Pieces(self.source)
        self._machine: Iterator[None] = self.machine()

    def machine(self) -> Step[None]:
        """Reads the whole answer."""
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text."""
        self.source.add(text)
        next(self._machine, None)
        return self.pieces.drain()

    def finish(self) -> list[Piece]:
        """The rest."""
        self.source.close()
        next(self._machine, None)
        return self.pieces.drain()


class FormatStream(Stream):
    """Reads an answer by a format.

    White space that only separates is part of the format: around a thought, between calls and after them, and before
    calls that nothing else precedes. All other text that is no thought and no call is content, as it stands: also
    what began like a call and turned out to be none. Such text is not searched for further calls.
    """

    def __init__(self, form: Format, tools: Sequence[Tool], opened: bool) -> None:
        """`opened`: the prompt ends within a thought. Without tools everything after the thought is content."""
        self._format = form
        self._markers = form.markers if tools else Markers(())
        self._opened = opened
        self._strict = any(tool.strict for tool in tools)
        self._tools = tools
        self._lead = ""  # white space that is content only if content follows
        self._bare = True  # nothing but white space has come since the answer, or a call, or a thought
        self._fresh = True  # the content so far has nothing in its last line
        super().__init__()

    def machine(self) -> Step[None]:
        """A thought, then content and calls in turn."""
        source = self.source
        yield from self._thought()
        while True:
            if self._bare:
                self._lead += yield from source.spaces()
            marker = yield from source.until(self._markers, self._content)
            if not marker:
                break
            yield from self._candidate(marker)
        if not self.pieces.calls:
            self.pieces.text("content", self._lead)

    def _thought(self) -> Step[None]:
        """One that the prompt has opened, or that opens the answer."""
        source, think = self.source, self._format.think
        self._lead = yield from source.spaces()
        if think is None:
            return
        begun = yield from source.try_take(think[0].strip())
        if not begun and not self._opened:
            return
        self._lead = ""
        yield from source.spaces()
        end = Markers([think[1].strip()])
        yield from source.until(end, self._reasoning)
        if not (yield from source.try_take(end.texts[0])):
            self._reasoning_ends_open()
            return
        self._lead = ""
        yield from source.spaces()

    def _reasoning(self, text: str) -> None:
        """Holds back white space, which may be the last before the end."""
        kept = text.rstrip()
        if kept:
            self.pieces.text("reasoning", self._lead + kept)
            self._lead = ""
        self._lead += text[len(kept) :]

    def _reasoning_ends_open(self) -> None:
        self.pieces.text("reasoning", self._lead)
        self._lead = ""

    def _content(self, text: str) -> None:
        self.pieces.text("content", self._lead + text)
        line = (self._lead + text).rpartition("\n")
        self._fresh = not line[2].strip() and (self._fresh or bool(line[1]))
        self._lead, self._bare = "", False

    def _candidate(self, marker: str) -> Step[None]:
        """A marker follows. Whichever form reads a call has it; else what any of them could read is content."""
        source, before, reach = self.source, self.pieces.calls, 1
        source.keep()
        for form in self._format.forms:
            if form.marker != marker or not (yield from self._may_begin(form)):
                continue
            yield from self._calls(form)
            if self.pieces.calls > before:
                return
            reach = max(reach, source.rewind())
        source.forget()
        self._content(source.take(reach))

    def _may_begin(self, form: Form) -> Step[bool]:
        if form.line_start and not self._fresh:
            return False
        if not (form.plain and self._strict):
            return True
        for start in starts(form, self._tools):
            if (yield from self.source.ahead(start)):
                return True
        return False

    def _calls(self, form: Form) -> Step[None]:
        """The calls from one beginning to its end. What cannot be read after the first of them is content."""
        source, before = self.source, self.pieces.calls
        if not (yield from source.literal(form.begin)):
            return
        while True:
            count = self.pieces.calls
            whole = yield from self._call(form)
            if self.pieces.calls == before:
                return
            if self.pieces.calls == count or not whole or not (yield from self._goes_on(form)):
                break
        rest, ended = source.forget(), (yield from source.peek()) == ""
        broken = self.pieces.calls > count and not whole  # within its record, whose other keys nobody wants
        self._lead, self._bare, self._fresh = "", True, True
        if ended and (broken or rest.strip() == form.separator.strip()):
            return
        if rest.strip():
            self._content(rest)
        else:
            self._lead = rest

    def _call(self, form: Form) -> Step[bool]:
        """One call with its opening and closing; the closing may be missing."""
        source = self.source
        if not (yield from source.literal(form.opening)):
            return False
        whole = yield from form.body.read(source, self.pieces, stop=form.cut, plain=form.plain)
        if whole:
            source.keep()  # what follows is the form's, or content
            yield from self._closed(form.closing)
        return whole

    def _closed(self, text: str) -> Step[None]:
        """The closing text, word by word, as far as it is there."""
        for word in text.split():
            yield from self.source.spaces()
            if not (yield from self.source.try_take(word)):
                return
            self.source.keep()

    def _goes_on(self, form: Form) -> Step[bool]:
        """Another call may follow before the end; reads the separator, or the end."""
        source = self.source
        yield from source.spaces()
        for last in (form.end, form.stop):
            if last and (yield from source.try_take(last.strip())):
                source.keep()
                return False
        separator = form.separator.strip()
        if separator and not (yield from source.try_take(separator)):
            return False
        return bool(separator or form.end)
