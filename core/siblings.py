"""Calls of one program (`GenerateCall.group`): the order in which they compute each prefix once."""

from __future__ import annotations

from .ranked import RankedQueue
from .request import Request


class Siblings:
    """The waiting members of every group, shortest first.

    In the places that the policy gives to one group's members the shorter ones go first: what one member's prompt
    begins with is another's whole prompt, then that one runs its last token anyway, and nobody needs to run it twice.
    O(log members) for each request that comes, goes, or is asked for.
    """

    def __init__(self) -> None:
        self._groups: dict[str, RankedQueue] = {}

    def add(self, request: Request) -> None:
        """A request waits in the queue from now on."""
        name = request.call.group
        if name is not None:
            self._groups.setdefault(name, RankedQueue(lambda request: len(request.tokens))).add(request)

    def remove(self, request: Request) -> None:
        """It has left the queue."""
        name = request.call.group
        queue = self._groups.get(name) if name is not None else None
        if name is not None and queue is not None and request in queue:
            queue.remove(request)
            if not len(queue):
                del self._groups[name]

    def turn(self, request: Request) -> Request | None:
        """Whose turn it is in the place of `request`; None if all of its group have left the queue."""
        name = request.call.group
        if name is None:
            return request
        queue = self._groups.get(name)
        return queue.first() if queue is not None else None
