"""Requests whose routing key many running ones have go first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phloem.interfaces import PluginContext
from phloem.ranked import RankedQueue
from phloem.request import Request, State

from ._bounded import BoundedOptions


class RoutingKeyOptions(BoundedOptions):
    """Options of `schedule: {use: routing-key}`."""


class RoutingKey:
    """Orders by how many running requests have the same `routing_key`, then by arrival; those without a key go last.

    Keeps one tenant's, adapter's or session's requests together. Costs O(running) a step.
    """

    api = 1
    Options = RoutingKeyOptions
    capabilities = frozenset({"queue"})

    def __init__(self, options: RoutingKeyOptions, context: PluginContext) -> None:
        self.max_overtakes = options.max_overtakes
        self._all = RankedQueue(lambda request: request.arrival)
        self._by_key: dict[str, RankedQueue] = {}
        self._started: dict[Request, None] = {}  # with a key; those that run no more are dropped when it is read

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """The keys that most running requests have first."""
        counts: dict[str, int] = {}
        self._started = {request: None for request in self._started if request.state is State.RUNNING}
        for request in self._started:
            key = request.call.routing_key
            assert key is not None, "only requests with a key are kept"
            counts[key] = counts.get(key, 0) + 1
        return self._read(sorted(counts, key=lambda key: -counts[key]))

    def _read(self, keys: list[str]) -> Iterator[Request]:
        """All of the first key, then of the next, then the others."""
        for key in keys:
            if key in self._by_key:
                yield from self._by_key[key].order()
        hot = {*keys}
        yield from (request for request in self._all.order() if request.call.routing_key not in hot)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The core's choice: the latest arrival."""
        return None

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        self._all.add(request)
        key = request.call.routing_key
        if key is not None:
            self._by_key.setdefault(key, RankedQueue(lambda request: request.arrival)).add(request)

    def remove(self, request: Request) -> None:
        """It waits no more; if it runs, its key counts."""
        self._all.remove(request)
        key = request.call.routing_key
        if key is None:
            return
        queue = self._by_key[key]
        queue.remove(request)
        if not len(queue):
            del self._by_key[key]
        if request.state is State.RUNNING:
            self._started[request] = None
