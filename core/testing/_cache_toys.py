"""What a cache is driven with in its conformance: a toy model, a request in progress, a listener."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from ..batch import IntArray
from ..interfaces import Lease
from ..model_spec import GroupSpec, LayerSpec, ModelSpec, StateSpec
from ..request import Namespace

Prefix = tuple[Namespace, bytes]  # what KV depends on: the namespace and all tokens up to a position
# Of a state group the window, None for full attention, or "states" for recurrent layers; these come last.
Kind = int | None | Literal["states"]


class Holder:
    """A request in progress: it leases [0, lease.length) and owns the rest of `slots` (per group).

    Of groups with a window it has only what begins at `lows[group]`. `states` are its own slots of recurrent layers, by
    the length of the prefix, and `snapshot` is the leased one, -1 if there is none.
    """

    def __init__(self, tokens: array[int], namespace: Namespace, lease: Lease, slots: list[IntArray]) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.lease = lease
        self.slots = slots
        self.lows = [0] * len(slots)
        self.states: dict[int, int] = {}
        self.snapshot = -1
        self.computed = self.found = lease.length

    def prefix(self, end: int) -> Prefix:
        """What the KV of token end - 1 was computed from."""
        return self.namespace, self.tokens[:end].tobytes()

    def own(self, group: int) -> IntArray:
        """Slots that are neither the cache's nor given back."""
        return self.slots[group][max(self.lease.length, self.lows[group]) :]


class Listener:
    """What the cache says it holds: a view made of what it tells alone, as prefixes of whole pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.view: set[Prefix] = set()

    def _told(self, namespace: Namespace, tokens: array[int], start: int) -> set[Prefix]:
        page = self.page_size
        assert 0 <= start < len(tokens), f"told of {len(tokens)} tokens from {start} on"
        assert start % page == len(tokens) % page == 0, f"told of tokens {start} to {len(tokens)}, not whole pages"
        if start:
            assert (namespace, tokens[:start].tobytes()) in self.view, "told of a prefix whose start was never told"
        return {(namespace, tokens[:end].tobytes()) for end in range(start + page, len(tokens) + 1, page)}

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """New prefixes."""
        told = self._told(namespace, tokens, start)
        assert not told & self.view, "told twice of the same prefix"
        self.view |= told

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """Prefixes that are gone."""
        told = self._told(namespace, tokens, start)
        assert told <= self.view, "told of the end of a prefix that was not there"
        self.view -= told

    def cleared(self) -> None:
        """A new start."""
        self.view.clear()


def toy_model(kinds: Sequence[Kind]) -> ModelSpec:
    """Two layers of each state group."""
    groups: list[GroupSpec] = []
    for kind in kinds:
        if kind == "states":
            groups.append(GroupSpec("recurrent", "recurrent", draft="chain"))
        else:
            groups.append(GroupSpec("full") if kind is None else GroupSpec(f"window {kind}", "window", kind))
    layers = [LayerSpec(1, 1, 1, group) for group, kind in enumerate(kinds) if kind != "states"]
    states = (StateSpec(((1,),)),) * 2 if "states" in kinds else ()
    return ModelSpec("toy", 8, 10**6, (*layers, *layers), tuple(groups), states=states)
