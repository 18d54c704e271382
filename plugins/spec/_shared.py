"""Memories that requests of one namespace share, bounded in size and number, and the forgetting of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sized
from typing import Generic, TypeVar

from phloem.request import Namespace

M = TypeVar("M", bound=Sized)
_NAMESPACES = 64  # the one not used for longest is forgotten


class Generations(Generic[M]):
    """Two memories: what is new goes into the young one; once it is full, the old one is dropped for it.

    So forgetting is one assignment, and what is in use comes into the young one again.
    """

    def __init__(self, make: Callable[[], M], limit: int) -> None:
        self._make, self._limit = make, max(1, limit // 2)
        self.young = make()
        self.old: M | None = None
        self.number = 0  # of the young one: an older number is a place in a memory that is not the young one any more

    def age(self) -> None:
        """Called before something is added."""
        if len(self.young) > self._limit:
            self.young, self.old = self._make(), self.young
            self.number += 1


class Shared(Generic[M]):
    """Generations by namespace. Requests of different namespaces learn nothing of each other."""

    def __init__(self, make: Callable[[], M], limit: int) -> None:
        self._make, self._limit = make, limit
        self._known: OrderedDict[Namespace, Generations[M]] = OrderedDict()

    def of(self, namespace: Namespace) -> Generations[M]:
        """Of one namespace, made on first use."""
        found = self._known.get(namespace)
        if found is None:
            found = self._known[namespace] = Generations(self._make, self._limit)
            if len(self._known) > _NAMESPACES:
                self._known.popitem(last=False)
        self._known.move_to_end(namespace)
        return found
