"""Highest response ratio next: short prefills first, and whoever has waited long for its size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from phloem.interfaces import PluginContext
from phloem.ranked import RankedQueue
from phloem.request import Request, State

from ._bounded import BoundedOptions
from ._indexed import IndexedPolicy

_CLASSES = 16  # of service times, per octave
_LOOKS = 32  # requests whose class is renewed in one step


class HrrnOptions(BoundedOptions):
    """Options of `schedule: {use: hrrn}`."""


class Hrrn(IndexedPolicy):
    """Orders by waited / service, the largest first (Brinch Hansen, 1971), both in tokens.

    Service is what of a request's text is not cached; waited is the service of all that started since it came. Requests
    are filed in classes of service, sixteen an octave, so that only the first of each class competes. Its service is
    looked up when it does; the others' classes are renewed in turns, some in each step. So the order is that of the
    ratios up to 5 % and, where what is cached has just changed, a delay.
    """

    api = 1
    Options = HrrnOptions

    def __init__(self, options: HrrnOptions, context: PluginContext) -> None:
        self.max_overtakes = options.max_overtakes
        self._done = 0  # tokens of service started
        self._since: dict[Request, int] = {}  # what that was when it came
        self._filed: dict[Request, int] = {}  # its class
        self._classes: dict[int, RankedQueue] = {}
        self._turn: dict[Request, int] = {}
        self._turns: deque[tuple[int, Request]] = deque()  # stale if `_turn` differs
        self._serial = 0
        self._looks = 0  # firsts that may still be filed anew in this step
        super().__init__(context.page_size, lambda request: float(request.arrival))

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        super().add(request)
        self._since[request] = self._done
        self._serial += 1
        self._turn[request] = self._serial
        self._turns.append((self._serial, request))
        self._file(request)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        super().remove(request)
        self._unfile(request)
        del self._since[request], self._turn[request]
        if request.state is State.RUNNING:
            self._done += len(request.tokens) - request.computed

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """See the class."""
        return self._read()

    def _read(self) -> Iterator[Request]:
        self._looks = _LOOKS
        self._renew()
        for queue in self._classes.values():
            queue.restore()
        while (request := self._next()) is not None:
            self._classes[self._filed[request]].pass_over()
            yield request

    def _next(self) -> Request | None:
        """The first of the class whose first has the highest ratio."""
        while True:
            heads = [head for queue in self._classes.values() if (head := queue.first()) is not None]
            moved = [head for head in heads[: self._looks] if self._moves(head)]
            self._looks -= len(moved)
            if not moved:
                return max(heads, key=lambda head: (self._ratio(head), -head.arrival), default=None)

    def _ratio(self, request: Request) -> float:
        return (self._done - self._since[request] + 1) / self._service(request)  # one more: the shorter of two new ones

    def _service(self, request: Request) -> int:
        return max(1, len(request.tokens) - self._index.matched(request))

    def _class(self, request: Request) -> int:
        return int(_CLASSES * math.log2(self._service(request)))

    def _moves(self, request: Request) -> bool:
        """File a request anew if its class has changed."""
        if self._class(request) == self._filed[request]:
            return False
        self._unfile(request)
        self._file(request)
        return True

    def _file(self, request: Request) -> None:
        name = self._filed[request] = self._class(request)
        self._classes.setdefault(name, RankedQueue(lambda request: self._since[request])).add(request)

    def _unfile(self, request: Request) -> None:
        name = self._filed.pop(request)
        self._classes[name].remove(request)
        if not len(self._classes[name]):
            del self._classes[name]

    def _renew(self) -> None:
        """Look at the next few of all in turns."""
        for _ in range(min(_LOOKS, len(self._turns))):
            serial, request = self._turns.popleft()
            if self._turn.get(request) == serial:
                self._moves(request)
                self._turns.append((serial, request))
