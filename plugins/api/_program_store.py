"""Program states that the server keeps between requests: made, found, forked, and forgotten when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from phloem.errors import AbortedError, EngineDeadError, QueueFullError, RequestError
from phloem.interfaces import Service

from ._params import new_id
from ._program_text import Added, Text

SWEEP_S = 0.5  # expired states are looked for at most so often


class Limits(NamedTuple):
    """How many states are kept, and for how many seconds without use: by default, and at most."""

    most: int
    idle_s: float
    max_idle_s: float


class UnknownProgramError(RequestError):
    """No state of that id: never made, deleted, expired, or of a server before a restart."""

    status = 404
    code = "program_not_found"


class TakenError(RequestError):
    """The id that a program's maker has chosen is another's already."""

    status = 409
    code = "program_exists"


@dataclass(slots=True, eq=False)
class State:
    """One program's state. Its operations take turns; the id is also the name of its hold."""

    id: str
    group: str  # of all states that were forked from one, and of those whose makers say so
    salt: str | None
    priority: int
    idle_s: float
    text: Text = field(default_factory=Text)
    variables: dict[str, str] = field(default_factory=dict)
    used_s: float = field(default_factory=time.monotonic)
    turns: int = 0  # operations that run or wait
    call_id: str | None = None  # of the call that runs
    held: bool = False  # a call has ended that may have left a hold
    deleted: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def expired(self) -> bool:
        """Nobody has used it for too long."""
        return not self.turns and time.monotonic() - self.used_s > self.idle_s

    @asynccontextmanager
    async def turn(self, added: Added | None = None) -> AsyncIterator[None]:
        """Wait for the operations before this one; then `added` joins the text, and stays if this one succeeds.

        Raises UnknownProgramError if the state was deleted meanwhile.
        """
        self.turns += 1
        try:
            async with self.lock:
                if self.deleted:
                    raise UnknownProgramError(f"the program '{self.id}' was deleted", param="id")
                with self.text.unless_it_fails(added) if added is not None else nullcontext():
                    yield
        finally:
            self.turns -= 1
            self.used_s = time.monotonic()


class Store:
    """All states of a server. Used on one event loop."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self.limits = service, limits
        self._states: dict[str, State] = {}
        self._swept_s = 0.0

    def __len__(self) -> int:
        return len(self._states)

    async def make(
        self, state_id: str | None, *, salt: str | None, priority: int, group: str | None, idle_s: float | None
    ) -> State:
        """A new, empty state. Raises QueueFullError if there are too many, RequestError for a wrong idle time,
        TakenError for an id that another has.
        """
        most = self.limits.max_idle_s
        if idle_s is not None and not 0 < idle_s <= most:
            raise RequestError(f"idle_s must be above 0 and at most {most:g}, got {idle_s:g}", param="idle_s")
        state_id = state_id or new_id("program")
        await self._reserve(1)
        if state_id in self._states:
            raise TakenError(f"there is a program '{state_id}' already", hint="choose another id", param="id")
        idle = self.limits.idle_s if idle_s is None else idle_s
        return self._add(State(state_id, group or state_id, salt, priority, idle))

    async def fork(self, parent: State, count: int) -> list[State]:
        """States that begin with what the parent has now. Called in the parent's turn."""
        await self._reserve(count)
        return [
            self._add(
                State(
                    new_id("program"), parent.group, parent.salt, parent.priority, parent.idle_s,
                    parent.text.copy(), dict(parent.variables),
                )
            )
            for _ in range(count)
        ]  # fmt: skip

    async def find(self, state_id: str) -> State:
        """The state of an id. Raises UnknownProgramError."""
        await self.sweep()
        state = self._states.get(state_id)
        if state is not None and state.expired:
            await self.delete(state)
            state = None
        if state is None:
            raise UnknownProgramError(
                f"there is no program '{state_id[:80]}'",
                hint="it was deleted, expired because nobody used it, or the server has been restarted since: make a "
                "new one",
                param="id",
            )
        state.used_s = time.monotonic()
        return state

    async def delete(self, state: State) -> None:
        """Forget a state: what runs is aborted, what waits is refused, its hold ends."""
        self._states.pop(state.id, None)
        state.deleted = True
        with suppress(EngineDeadError):  # then there is no hold either
            if state.call_id is not None:
                await self._service.abort(state.call_id)
            if state.held or state.call_id is not None:
                await self._service.drop_hold(state.id)

    async def delete_several(self, state_ids: Iterable[str]) -> int:
        """Forget those that are known; how many these were."""
        found = [state for name in dict.fromkeys(state_ids) if (state := self._states.get(name)) is not None]
        await asyncio.gather(*map(self.delete, found))
        return len(found)

    async def sweep(self) -> None:
        """Forget expired states."""
        now = time.monotonic()
        if now - self._swept_s < SWEEP_S:
            return
        self._swept_s = now
        await self.delete_several([name for name, state in self._states.items() if state.expired])

    def aborted(self, state: State) -> AbortedError:
        """What an operation ends with whose call was aborted."""
        why = "its program was deleted" if state.deleted else "somebody aborted its call"
        return AbortedError(f"the operation was aborted: {why}")

    async def _reserve(self, count: int) -> None:
        if len(self._states) + count > self.limits.most:
            self._swept_s = 0.0
            await self.sweep()
        if len(self._states) + count > self.limits.most:
            raise QueueFullError(
                f"the server keeps {len(self._states)} programs, the limit is {self.limits.most}",
                hint="delete those that have ended, or retry later",
            )

    def _add(self, state: State) -> State:
        self._states[state.id] = state
        return state
