"""A branch of a program whose state lives in a phloem server. What it owes the server is sent when a result is needed.

Text and forks cost no round trip of their own time: they wait in order, and whoever needs a result first, the branch
itself or one forked from it, sends what lies before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.errors import PhloemError, RequestError
from phloem.params import SamplingParams

from ._failures import UnansweredError
from ._program_answers import counts, generation, together
from .base import Generation, Path, Selection

if TYPE_CHECKING:
    from .http import HttpBackend


class LostStateError(RequestError):
    """The server does not know a state any more: it was restarted, or nobody used the state for too long."""

    status = 404


class Split:
    """A fork on its way: the ids of its branches, once the parent has told the server."""

    def __init__(self, parent: HttpPath, count: int) -> None:
        self.parent = parent
        self.left = set(range(count))  # branches that are not closed
        self.ids: dict[int, str] | None = None
        self.error: PhloemError | None = None

    @property
    def due(self) -> bool:
        """Somebody may still need it."""
        return self.ids is None and self.error is None and bool(self.left)

    async def state(self, index: int) -> str:
        """The id of a branch's state. Raises what kept the parent from forking."""
        if self.ids is None and self.error is None:
            await self.parent.sync(until=self)
        if self.error is not None:
            raise self.error
        assert self.ids is not None
        return self.ids[index]


class HttpPath:
    """Implements `Path`."""

    def __init__(self, backend: HttpBackend, asked: dict[str, Any], split: Split | None = None, index: int = 0) -> None:
        """`asked` is what the program's state is made with; `split` and `index` say which branch of a fork this is."""
        self._backend, self._asked, self._split, self._index = backend, asked, split, index
        self._id: str | None = None
        self._waiting: deque[str | Split] = deque()
        self._lock = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._broken: UnansweredError | None = None
        self._empty = True  # nothing was ever appended
        self._templated = False  # the text begins as the chat format has it: the tokenizer puts nothing before it
        self._messages: list[dict[str, str]] = []
        self._open: tuple[str, str] | None = None  # role and content of the message that is being written

    # --- text

    def append(self, text: str) -> None:
        """Add text."""
        self._add(text)
        if self._open is not None:
            self._open = self._open[0], self._open[1] + text

    def _add(self, text: str) -> None:
        if text:
            self._waiting.append(text)
            self._empty = False

    def begin(self, role: str) -> str:
        """Open a message, in the model's chat format."""
        roles = self._backend.roles
        if self._messages or self._empty:
            text = roles.begin(self._messages, role)
            self._templated = self._templated or (not self._messages and not roles.plain)
        else:
            text = roles.begin_after_text(role, self._backend.bos)
        self._add(text)
        self._open = role, ""
        return text

    def end(self, role: str) -> str:
        """End the message."""
        text = self._backend.roles.end(self._messages, role)
        self._messages.append({"role": role, "content": self._open[1] if self._open is not None else ""})
        self._open = None
        self._add(text)
        return text

    def fork(self, count: int) -> list[Path]:
        """Branches that share everything up to here."""
        split = Split(self, count)
        self._waiting.append(split)
        made: list[Path] = []
        for index in range(count):
            branch = HttpPath(self._backend, self._asked, split, index)
            branch._messages, branch._open, branch._empty = list(self._messages), self._open, self._empty
            branch._templated = self._templated
            made.append(branch)
        return made

    # --- work

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        """Continue the text. Cancelling it closes the connection, which aborts the work."""
        if self._open is not None and not params.ignore_eos:
            params = self._backend.ending(params, self._backend.roles.end(self._messages, self._open[0]))
        body: dict[str, Any] = {"sampling_params": msgspec.to_builtins(params)}
        if on_text is not None:
            body["stream"] = True
        made = generation(await self._operate("generate", body, on_text))
        self._joined(made.texts[0])
        return made

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """All choices as one tree over the state's text."""
        body: dict[str, Any] = {"choices": list(choices), "method": method}
        if temperature:
            body["temperature"] = temperature
        answer = await self._operate("select", body)
        self._joined(answer["choice"])
        meta = counts(answer.get("usage") or {})
        return Selection(answer["index"], answer["choice"], answer["scores"], answer["token_logprobs"], meta)

    async def commit(self) -> None:
        """Hand the text over and have it computed: one token is generated behind it, and dropped."""
        await self._operate("generate", {"sampling_params": {"max_tokens": 1}, "append": False})

    def _joined(self, text: str) -> None:
        self._empty = False
        if self._open is not None:
            self._open = self._open[0], self._open[1] + text

    async def _operate(
        self, what: str, body: dict[str, Any], on_text: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """An operation, with the text that waits: the server appends it first, and takes it back if this fails."""
        if self._owes:
            await self.sync()
        if self._broken is not None:
            raise self._broken
        parts = len(self._waiting)
        answer = await self._ask(what, body, self._text(self._waiting), on_text)
        for _ in range(parts):
            self._waiting.popleft()
        return answer

    async def _ask(
        self,
        what: str,
        body: dict[str, Any],
        text: dict[str, Any],
        on_text: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """An operation's answer. The first one of a program makes its state, which lasts if this succeeds."""
        if self._id is not None:
            path, sent = f"/v1/programs/{self._id}/{what}", text | body
            with self._failing():
                return await self._answer(path, sent, on_text)
        made = f"program-{uuid.uuid4().hex}"
        try:
            asked = {"id": made, **self._asked, **text, what: body}
            answer = await self._answer("/v1/programs", asked, on_text)
        except (asyncio.CancelledError, UnansweredError):  # it may have ended well there all the same
            self._backend.drop(made)
            raise
        self._id = made
        return answer

    async def _answer(self, path: str, body: dict[str, Any], on_text: Callable[[str], None] | None) -> dict[str, Any]:
        """The answer, or what the events of a streamed one make."""
        if on_text is None:
            found: dict[str, Any] = await self._backend.call("POST", path, body)
            return found
        async with contextlib.aclosing(self._backend.events(path, body)) as events:
            return await together(events, on_text)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What failures of requests mean for this path."""
        try:
            yield
        except RequestError as error:
            if error.status != 404:
                raise
            raise LostStateError(
                f"{self._backend.url} has lost the state of this program ({self._id})",
                hint="the server was restarted in the middle of the program, or the state was not used for longer than "
                "its idle time: run the program again, with RuntimeEndpoint(..., idle_s=...) if it pauses for long",
            ) from error
        except UnansweredError as error:  # whether it was done nobody knows: it is not done again
            self._broken = error
            raise

    def _text(self, parts: Iterable[str | Split]) -> dict[str, Any]:
        """Text in a request's body."""
        text = "".join(map(str, parts))
        return ({"text": text} | ({"add_special_tokens": False} if self._templated else {})) if text else {}

    # --- what is owed

    async def sync(self, until: Split | None = None) -> None:
        """Tell the server of the forks that wait, up to one or all, and learn this path's state if it is a branch.

        Whoever waits for it may leave: what is being sent is sent whole.
        """
        task = asyncio.ensure_future(self._send(until))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        await asyncio.shield(task)

    async def _send(self, until: Split | None) -> None:
        async with self._lock:
            if self._broken is not None:
                raise self._broken
            while (split := next((one for one in self._waiting if isinstance(one, Split)), None)) is not None:
                if until is not None and not until.due:
                    return
                await self._send_fork(split)
            if until is None:
                await self._branch()

    @property
    def _owes(self) -> bool:
        """There are forks that the server does not know of: that wait here, or that this is a branch of."""
        unborn = self._id is None and self._split is not None
        return unborn or any(isinstance(item, Split) for item in self._waiting)

    async def _branch(self) -> None:
        """A branch of a fork has its state from its parent."""
        if self._id is None and self._split is not None:
            self._id = await self._split.state(self._index)

    async def _send_fork(self, split: Split) -> None:
        """A fork, with the text before it. The text stays in the queue where nobody needs the fork any more."""
        before = self._waiting.index(split)
        if split.due:
            try:
                await self._branch()
                left = sorted(split.left)
                text = self._text(itertools.islice(self._waiting, before))
                ids = (await self._ask("fork", {"n": len(left)}, text))["ids"]
            except PhloemError as error:
                split.error = error
                raise
            split.ids = dict(zip(left, ids, strict=True))
            for _ in range(before):
                self._waiting.popleft()
        self._waiting.remove(split)

    async def close(self) -> None:
        """Have the server drop the state, after the branches that still need it have got theirs. Idempotent.

        The dropping itself is not waited for.
        """
        if self._closed:
            return
        self._closed = True
        while self._sending:  # by one who was cancelled meanwhile: it may be making the state that is to be dropped
            await asyncio.wait(self._sending)
        with contextlib.suppress(PhloemError):  # gone already, or nobody there who could keep it
            for split in [item for item in self._waiting if isinstance(item, Split) and item.due]:
                await self.sync(until=split)
            if self._split is not None and self._id is None:
                await self._leave(self._split)
            if self._id is not None:
                self._backend.drop(self._id)

    async def _leave(self, split: Split) -> None:
        """Close a branch that has never needed its state: a fork that is still to be sent leaves it out."""
        async with split.parent._lock:
            split.left.discard(self._index)
            self._id = (split.ids or {}).get(self._index)
