"""Random histories of requests, for the conformance of caches."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..request import Namespace
from ._cache_rig import CacheRig
from ._cache_toys import Holder

SALTS = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"), Namespace(salt="a", adapter="a"))

_runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=5)
_any = st.integers(0, 10**6)
_spaces = st.sampled_from((Namespace(),) * 5 + SALTS)  # mostly one, so that requests do meet


class History(RuleBasedStateMachine):
    """A random history of requests; `CacheRig` checks each operation, `audit` the state after each."""

    texts: Bundle[array[int]] = Bundle("texts")

    def __init__(self, rig: CacheRig) -> None:
        super().__init__()
        self.rig = rig
        self.holders: list[Holder] = []

    def _written(self, runs: list[tuple[int, int]]) -> array[int]:
        """Long runs of two tokens: they diverge at any offset of a page, and repeat themselves."""
        longest = 3 * self.rig.page_size + 2
        return array("i", [token for token, length in runs for _ in range(1 + length % longest)])

    def _pick(self, which: int) -> Holder:
        return self.holders[which % len(self.holders)]

    @initialize(target=texts, runs=_runs)
    def first_text(self, runs: list[tuple[int, int]]) -> array[int]:
        return self._written(runs)

    @rule(target=texts, text=texts, cut=_any, runs=_runs)
    def branch(self, text: array[int], cut: int, runs: list[tuple[int, int]]) -> array[int]:
        return text[: cut % (len(text) + 1)] + self._written(runs)

    @rule(text=texts, namespace=_spaces)
    def serve(self, text: array[int], namespace: Namespace) -> None:
        self.rig.serve(text, namespace)

    @precondition(lambda self: len(self.holders) < 5)
    @rule(text=texts, namespace=_spaces, limit=_any, twins=st.booleans())
    def start(self, text: array[int], namespace: Namespace, limit: int, twins: bool) -> None:
        """Twins compute the same text side by side, and both publish it."""
        for _ in range(1 + twins):
            self.holders.append(self.rig.start(text, namespace, limit % (len(text) + 1)))

    @precondition(lambda self: self.holders)
    @rule(which=_any, tokens=_any)
    def compute(self, which: int, tokens: int) -> None:
        holder = self._pick(which)
        self.rig.compute(holder, holder.computed + tokens % (len(holder.tokens) - holder.computed + 1))

    @precondition(lambda self: self.holders)
    @rule(which=_any, tokens=_any)
    def publish(self, which: int, tokens: int) -> None:
        holder = self._pick(which)
        least = holder.lease.length
        self.rig.publish(holder, least + tokens % (holder.computed - least + 1))

    @precondition(lambda self: self.holders)
    @rule(which=_any)
    def slide(self, which: int) -> None:
        self.rig.slide(self._pick(which))

    @precondition(lambda self: self.holders)
    @rule(which=_any, publish=st.booleans())
    def end(self, which: int, publish: bool) -> None:
        holder = self._pick(which)
        self.holders.remove(holder)
        if publish:
            self.rig.finish(holder)
        else:
            self.rig.abort(holder)

    @rule(text=texts, namespace=_spaces, limit=_any)
    def look(self, text: array[int], namespace: Namespace, limit: int) -> None:
        self.rig.look(text, namespace, limit % (len(text) + 1))

    @rule(slots=_any, group=_any)
    def evict(self, slots: int, group: int) -> None:
        self.rig.evict(slots % (self.rig.total // 2), group % len(self.rig.pools))

    @rule()
    def reset(self) -> None:
        self.rig.reset()

    @invariant()
    def sound(self) -> None:
        self.rig.audit()

    def teardown(self) -> None:
        for holder in self.holders:
            self.rig.abort(holder)
        self.rig.reset()
        assert all(pool.free == pool.total for pool in self.rig.pools), "slots were lost"
