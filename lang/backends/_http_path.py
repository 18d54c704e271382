"""A branch of a program whose state lives in a phloem server. What it owes the server is sent when a result is needed.

Text and forks cost no round trip of their own time: they wait in order, and whoever needs a result first, the branch
itself or one forked from it, sends what lies before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.errors import EngineDeadError, PhloemError, RequestError
from phloem.messages import TokenLogprob
from phloem.params import SamplingParams

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
        self._broken: EngineDeadError | None = None
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
        text = self._backend.roles.begin(self._messages, role)
        if not self._messages and not self._backend.roles.plain:
            if self._empty:
                self._templated = True
            else:
                text = text.removeprefix(self._backend.bos)
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
        await self.sync()
        body = {"sampling_params": msgspec.to_builtins(params), "stream": on_text is not None}
        if on_text is None:
            answer = await self._post("generate", body)
        else:
            answer = await self._streamed(body, on_text)
        made = generation(answer)
        self._joined(made.texts[0])
        return made

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """All choices as one tree over the state's text."""
        await self.sync()
        body: dict[str, Any] = {"choices": list(choices), "method": method}
        if temperature:
            body["temperature"] = temperature
        answer = await self._post("select", body)
        self._joined(answer["choice"])
        meta = counts(answer.get("usage") or {})
        return Selection(answer["index"], answer["choice"], answer["scores"], answer["token_logprobs"], meta)

    async def commit(self) -> None:
        """Hand the text over and have it computed: one token is generated behind it, and dropped."""
        await self.sync()
        await self._post("generate", {"sampling_params": {"max_tokens": 1}, "append": False})

    def _joined(self, text: str) -> None:
        self._empty = False
        if self._open is not None:
            self._open = self._open[0], self._open[1] + text

    async def _post(self, what: str, body: dict[str, Any]) -> Any:
        try:
            return await self._backend.call("POST", f"/v1/programs/{self._id}/{what}", body)
        except RequestError as error:
            raise self._lost(error) from error

    async def _streamed(self, body: dict[str, Any], on_text: Callable[[str], None]) -> dict[str, Any]:
        """The last event, with what the deltas before it said put together."""
        events = self._backend.events(f"/v1/programs/{self._id}/generate", body)
        try:
            async with contextlib.aclosing(events):
                return await together(events, on_text)
        except RequestError as error:
            raise self._lost(error) from error

    def _lost(self, error: RequestError) -> RequestError:
        if error.status != 404:
            return error
        return LostStateError(
            f"{self._backend.url} has lost the state of this program ({self._id})",
            hint="the server was restarted in the middle of the program, or the state was not used for longer than its "
            "idle time: run the program again, with RuntimeEndpoint(..., idle_s=...) if it pauses for long",
        )

    # --- what is owed

    async def sync(self, until: Split | None = None) -> None:
        """Send what waits, up to a fork or all of it. Whoever waits may leave: what is being sent is sent whole."""
        task = asyncio.ensure_future(self._send(until))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        await asyncio.shield(task)

    async def _send(self, until: Split | None) -> None:
        async with self._lock:
            if self._broken is not None:
                raise self._broken
            while self._waiting and not (until is not None and not until.due):
                if isinstance(self._waiting[0], Split):
                    await self._send_fork(self._waiting[0])
                else:
                    await self._send_text()
            if until is None:
                await self._state()

    async def _state(self, first: dict[str, Any] | None = None) -> bool:
        """Make sure that the server has the state; True if it was made with `first`, an append's body."""
        if self._id is not None:
            return False
        if self._split is not None:
            self._id = await self._split.state(self._index)
            return False
        self._id = (await self._backend.call("POST", "/v1/programs", self._asked | (first or {})))["id"]
        return first is not None

    async def _send_text(self) -> None:
        """The texts up to the next fork, as one."""
        parts = list(itertools.takewhile(lambda item: isinstance(item, str), self._waiting))
        body: dict[str, Any] = {"text": "".join(map(str, parts))}
        if self._templated:
            body["add_special_tokens"] = False
        if not await self._state(body):
            try:
                await self._post("append", body)
            except EngineDeadError as error:  # whether the text has arrived nobody knows: it is not sent again
                self._broken = error
                raise
        for _ in parts:
            self._waiting.popleft()

    async def _send_fork(self, split: Split) -> None:
        if split.due:
            left = sorted(split.left)
            try:
                await self._state()
                ids = (await self._post("fork", {"n": len(left)}))["ids"]
                split.ids = dict(zip(left, ids, strict=True))
            except PhloemError as error:
                split.error = error
        self._waiting.popleft()

    async def close(self) -> None:
        """Have the server drop the state, after the branches that still need it have got theirs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(PhloemError):  # gone already, or nobody there who could keep it
            for split in [item for item in self._waiting if isinstance(item, Split) and item.due]:
                await self.sync(until=split)
            if self._split is not None and self._id is None:
                await self._leave(self._split)
            if self._id is not None:
                await self._backend.call("DELETE", f"/v1/programs/{self._id}")

    async def _leave(self, split: Split) -> None:
        """Close a branch that has never needed its state: a fork that is still to be sent leaves it out."""
        async with split.parent._lock:
            split.left.discard(self._index)
            self._id = (split.ids or {}).get(self._index)


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Token counts of an answer."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {name: usage[name] for name in names if name in usage}


def generation(answer: dict[str, Any]) -> Generation:
    """The server's answer to a generation."""
    outputs = answer.get("choices") or [answer]
    usage = counts(answer.get("usage") or {})
    metas: list[dict[str, Any]] = []
    logprobs = []
    for output in outputs:
        meta = {name: output.get(name) for name in ("finish_reason", "stop_reason")} | usage
        if "token_ids" in output:
            meta["completion_tokens"] = len(output["token_ids"])  # with n > 1 the usage counts all choices
        if output.get("notes"):
            meta["notes"] = output["notes"]
        if output.get("logprobs") is not None:
            meta["tokens"] = [item["token"] for item in output["logprobs"]]
            logprobs.append([_logprob(item) for item in output["logprobs"]])
        metas.append(meta)
    prompt = answer.get("prompt_logprobs") or outputs[0].get("prompt_logprobs")
    if prompt is not None:
        metas[0]["prompt_logprobs"] = [item and _logprob(item) for item in prompt]
        metas[0]["prompt"] = [item["token"] if item else None for item in prompt]
    whole = len(logprobs) == len(outputs)
    return Generation([output["text"] for output in outputs], metas, logprobs if whole else None)


def _logprob(item: dict[str, Any]) -> TokenLogprob:
    top = [(one["token_id"], one["logprob"]) for one in item.get("top_logprobs") or []]
    return TokenLogprob(item["token_id"], item["logprob"], top)


_OF_THE_END = ("finish_reason", "stop_reason", "notes", "prompt_logprobs")


async def together(events: AsyncGenerator[dict[str, Any], None], on_text: Callable[[str], None]) -> dict[str, Any]:
    """The answer that a stream's events make; each delta of the first choice goes to `on_text`."""
    parts: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    async for event in events:
        index = event.get("index", 0)
        part = parts.setdefault(index, {})
        for name in ("text", "token_ids", "logprobs"):
            if event.get(name) is not None:
                part[name] = part[name] + event[name] if name in part else event[name]
        part.update({name: event[name] for name in _OF_THE_END if event.get(name) is not None})
        usage = event.get("usage") or usage
        if event.get("text") and index == 0:
            on_text(event["text"])
    return {"choices": [parts[index] for index in sorted(parts)], "usage": usage}
