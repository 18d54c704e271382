"""States whose programs have ended are dropped in the background, many by one request: no program waits for it.

What does not reach the server is forgotten there when its idle time is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

GATHER_S = 0.05  # so long the first waits for others
MOST = 256  # of one request; so many do not wait


class Endings:
    """Gathers the ids of states that nobody needs. Thread-safe. A process that ends waits for what is under way."""

    def __init__(self, send: Callable[[list[str]], None]) -> None:
        """`send` tells the server; it blocks, raises nothing, and is called on threads of their own."""
        self._send = send
        self._ids: list[str] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # who has it sends; whoever wants it later waits for that
        self._timer: threading.Timer | None = None

    def add(self, state: str) -> None:
        """This one has ended."""
        with self._lock:
            self._ids.append(state)
            if self._timer is None or len(self._ids) == MOST:
                self._start(GATHER_S if len(self._ids) < MOST else 0.0)

    def _start(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(delay_s, self.flush)
        self._timer.name = "phloem-endings"
        self._timer.start()

    def flush(self) -> None:
        """Tell the server of all that have ended by now. Returns when it has answered."""
        with self._sending:
            with self._lock:
                ids, self._ids, timer, self._timer = self._ids, [], self._timer, None
            if timer is not None:
                timer.cancel()
            for start in range(0, len(ids), MOST):
                self._send(ids[start : start + MOST])

    def hurry(self) -> None:
        """`flush` without waiting for it."""
        with self._lock:
            if self._ids:
                self._start(0.0)
