"""The contract of kind `schedule`; plugins import it from `phloem.interfaces`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .request import Request


class Policy(Protocol):
    """Kind `schedule`. Orders the waiting requests and, where it wants, names a victim. Budgets are the core's.

    Capabilities: `matched`: it reads `request.matched`, which is then fresh, of all before each `order`, or with
    `queue` at `add`. `queue`: it keeps the queue itself, see `QueuePolicy`. `listens`: it is a `CacheListener`.
    `priority`: it reads `request.call.priority`. `preempts`: see `PreemptingPolicy`.

    An optional attribute `max_overtakes`, a number, makes the core see to it that no request is overtaken by more later
    ones than that, whatever `order` says.
    """

    capabilities: frozenset[str]

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """The waiting requests, best first, each once. Called once per step in which something may start.

        Read only as far as something may start, so it pays to be lazy. With `queue`, `waiting` is empty.
        """

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Whom to retract when slots run out; None leaves it to the core (latest arrival)."""


class QueuePolicy(Protocol):
    """What a policy with the capability `queue` has besides: then nothing in a step costs time for all who wait.

    Both are also called while an `order` is being read; what they change counts from the next request on.
    """

    def add(self, request: Request) -> None:
        """A request has come to the queue: it is new, was retracted, or no longer waits for another one's prefix."""

    def remove(self, request: Request) -> None:
        """It has left the queue: it runs (see its `state`), has ended, or waits for a prefix in the making."""


class PreemptingPolicy(Protocol):
    """What a policy with the capability `preempts` has besides."""

    def preempt(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Which running request gives way to a waiting one for which there is no place; None for none.

        Asked again until it fits. Must not name one that would in its turn be given `request`'s place.
        """
