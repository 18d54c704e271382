"""Calls of one program (`GenerateCall.group`): the order in which they compute each prefix once."""

from __future__ import annotations

from heapq import heappop, heappush

from .request import Request


class Siblings:
    """The waiting members of every group, shortest first.

    In the places that the policy gives to one group's members the shorter ones go first: what one member's prompt
    begins with is another's whole prompt, then that one runs its last token anyway, and nobody needs to run it twice.
    O(log members) for each request that comes, goes, or is asked for.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[Request, None]] = {}
        self._shortest: dict[str, list[tuple[int, int, int, Request]]] = {}  # lazy: may hold requests that have left
        self._serial = 0  # makes entries comparable

    def add(self, request: Request) -> None:
        """A request waits in the queue from now on."""
        name = request.call.group
        if name is not None:
            members = self._groups.setdefault(name, {})
            members[request] = None
            heap = self._shortest.setdefault(name, [])
            self._push(heap, request)
            if len(heap) > 2 * len(members) + 8:
                heap.clear()
                for member in members:
                    self._push(heap, member)

    def _push(self, heap: list[tuple[int, int, int, Request]], request: Request) -> None:
        self._serial += 1
        heappush(heap, (len(request.tokens), request.arrival, self._serial, request))

    def remove(self, request: Request) -> None:
        """It has left the queue."""
        name = request.call.group
        if name is not None and name in self._groups:
            self._groups[name].pop(request, None)
            if not self._groups[name]:
                del self._groups[name], self._shortest[name]

    def turn(self, request: Request) -> Request | None:
        """Whose turn it is in the place of `request`; None if all of its group have left the queue."""
        name = request.call.group
        if name is None:
            return request
        heap, members = self._shortest.get(name, []), self._groups.get(name, {})
        while heap and (heap[0][3] not in members or heap[0][0] != len(heap[0][3].tokens)):
            heappop(heap)
        return heap[0][3] if heap else None
