"""Depth first through the cached tree, the branch that most requests wait below first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phloem.interfaces import PluginContext
from phloem.request import Request

from ._bounded import BoundedOptions
from ._indexed import IndexedPolicy
from ._trie import Node


class DfsWeightOptions(BoundedOptions):
    """Options of `schedule: {use: dfs-weight}`."""


class DfsWeight(IndexedPolicy):
    """Drains a cached branch before the next, so that it is not evicted while requests wait for it.

    The weight of a branch is the number of requests that wait below it. At every fork the heaviest goes first, but one
    that was begun is finished first; of a branch, what matches deeper goes before what matches its start. After
    DFS-weight of RadixAttention (Zheng et al., arXiv 2312.07104). Costs O(cached branches at a fork) for each request
    that is read.
    """

    api = 1
    Options = DfsWeightOptions

    def __init__(self, options: DfsWeightOptions, context: PluginContext) -> None:
        self.max_overtakes = options.max_overtakes
        self._begun: set[Node] = set()  # the path of the request that was read last
        super().__init__(context.page_size, lambda request: float(request.arrival))

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """See the class."""
        return self._read()

    def _read(self) -> Iterator[Request]:
        index = self._index
        index.restore()
        while (request := self._next()) is not None:
            yield request
            index.pass_over(request)
        index.restore()

    def _next(self) -> Request | None:
        """The request to which the weights lead."""
        forks: Iterable[Node] = self._index.trie.roots.values()
        path: list[Node] = []
        while heavy := [node for node in forks if node.count]:
            node = max(heavy, key=lambda node: (node in self._begun, node.count))
            path.append(node)
            forks = node.lit
        self._begun = {*path}
        return self._index.first_at(path[-1]) if path else None
