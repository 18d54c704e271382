"""Keeps a model process running: restarts it with back-off, gives up with the reason, and judges its health."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .model_process import WORKER, ModelProcess
from .remote import RemoteService
from .wire import Message, Ready

log = logging.getLogger(__name__)
RESTART_WINDOW_S = 600.0  # deaths longer ago are forgotten
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # pause before a restart; doubles with each death in the window
MISSED_BEATS = 10  # so many intervals without a sign of life make a process count as hung


@dataclass(frozen=True, slots=True)
class Patience:
    """When to worry: the server section's settings."""

    heartbeat_s: float = 1.0
    hang_s: float = 60.0
    max_restarts: int = 3


@dataclass(slots=True)
class Supervisor:
    """Runs as one task. `service` fails in-flight calls the moment the process dies."""

    service: RemoteService
    config: dict[str, Any]
    patience: Patience = field(default_factory=Patience)
    command: Sequence[str] = WORKER
    on_ready: Callable[[Ready], None] | None = None
    first: asyncio.subprocess.Process | None = None  # the first process, if it has been spawned already
    restarts: int = 0
    process: ModelProcess | None = None
    failure: str | None = None  # set when the supervisor has given up
    _state: str = "loading"
    _beat_at: float = 0.0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _deaths: collections.deque[float] = field(default_factory=collections.deque)

    async def run(self) -> int:
        """Supervise until `stop`, or until restarting is pointless; returns the exit status for the whole server."""
        while True:
            process = self.process = ModelProcess(self._receive, self.command, self.first)
            self.first = None
            status = await process.run(self.config, self.patience.heartbeat_s)
            why = process.obituary(status)
            if self._stopping.is_set():
                self.service.disconnect("the server is shutting down")
                return 0
            wait = self._next_wait(final=process.failure is not None and process.failure.final)
            if wait is None:
                self.failure, self._state = why, "failed"
                self.service.disconnect("the model process cannot be started")
                return status if status > 0 else 1
            self._state = "restarting"
            self.service.disconnect("the model process died; it is being restarted")
            log.error("%s\nrestart %d in %.1f s", why, self.restarts + 1, wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
                return 0
            self.restarts += 1

    async def stop(self) -> None:
        """End the process for good."""
        self._stopping.set()
        if self.process is not None:
            await self.process.stop()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the engine lives, and what that is based on. Looks only at beats: nothing is queued anywhere.

        A long step is healthy: beats come from a thread of their own. Hung is a process whose beats stop, or which
        has had work for `hang_s` without finishing a step.
        """
        detail: dict[str, Any] = {"status": self._state, "restarts": self.restarts}
        if self.service.ready is not None:
            detail["plugins"] = self.service.ready.plugins
        beat = self.service.beat
        if self._state != "ready" or beat is None:
            return False, detail
        silent_s = time.monotonic() - self._beat_at
        detail |= {"steps": beat.steps, "beat_age_s": round(silent_s, 3), "stalled_s": round(beat.stalled_s, 3)}
        if silent_s > MISSED_BEATS * self.patience.heartbeat_s or beat.stalled_s > self.patience.hang_s:
            return False, detail | {"status": "hung"}
        return True, detail

    @property
    def ready(self) -> bool:
        """Whether new calls can be served."""
        return self._state == "ready" and not self._stopping.is_set()

    def latest(self) -> tuple[str, dict[str, Any]]:
        """The model's name and the engine's statistics as of the last beat; empty before the first."""
        ready, beat = self.service.ready, self.service.beat
        return (ready.info.model_name if ready else "", beat.stats if beat else {})

    def _receive(self, message: Message) -> None:
        self._beat_at = time.monotonic()
        self.service.receive(message)
        if isinstance(message, Ready):
            assert self.process is not None
            self._state = "ready"
            self.service.connect(self.process.send)
            if self.on_ready is not None:
                self.on_ready(message)

    def _next_wait(self, *, final: bool) -> float | None:
        """Seconds until the next start after a death just now; None to give up."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - RESTART_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > self.patience.max_restarts or (final and self._state == "loading"):
            return None
        return float(min(FIRST_WAIT_S * 2 ** (len(self._deaths) - 1), LONGEST_WAIT_S))
