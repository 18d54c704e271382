"""The waiting index gives, after any history, the order that matching every request again and sorting gives."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest

from phloem.messages import GenerateCall
from phloem.params import SamplingParams
from phloem.plugins.schedule._index import WaitingIndex
from phloem.plugins.schedule._trie import Node, Root
from phloem.request import Namespace, Request

SPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"))
CHARGE = 1.5


class Cached:
    """The naive cache: all prefixes of whole pages that it holds; tells the index what it stores and removes."""

    def __init__(self, index: WaitingIndex, page: int) -> None:
        self.index, self.page = index, page
        self.held: set[tuple[Namespace, bytes]] = set()

    def match(self, namespace: Namespace, tokens: array[int], limit: int) -> int:
        length = 0
        while length + self.page <= limit and (namespace, tokens[: length + self.page].tobytes()) in self.held:
            length += self.page
        return length

    def store(self, namespace: Namespace, tokens: array[int]) -> None:
        end = len(tokens) // self.page * self.page
        start = self.match(namespace, tokens, end)
        if start < end:
            self.held |= {(namespace, tokens[:n].tobytes()) for n in range(self.page, end + 1, self.page)}
            self.index.stored(namespace, tokens[:end], start)

    def evict(self, rng: random.Random) -> None:
        """A leaf, or its tail."""
        if not self.held:
            return
        leaves = [
            (space, text)
            for space, text in sorted(self.held, key=repr)
            if not any(s == space and len(t) > len(text) and t.startswith(text) for s, t in self.held)
        ]
        namespace, text = rng.choice(leaves)
        tokens = array("i", text)
        branch = max(
            (n for n in range(0, len(tokens), self.page) if self._branches(namespace, tokens[:n], text)), default=0
        )
        start = rng.randrange(branch, len(tokens), self.page)
        self.held -= {(namespace, tokens[:n].tobytes()) for n in range(start + self.page, len(tokens) + 1, self.page)}
        self.index.removed(namespace, tokens, start)

    def _branches(self, namespace: Namespace, tokens: array[int], text: bytes) -> bool:
        start = tokens.tobytes()
        return any(s == namespace and t.startswith(start) and not text.startswith(t) for s, t in self.held)

    def clear(self, rng: random.Random) -> None:
        """What is leased stays, and is told anew."""
        kept = [array("i", text) for space, text in sorted(self.held, key=repr) if space == SPACES[0]][:1]
        self.held = set()
        self.index.cleared()
        for tokens in kept:
            self.store(SPACES[0], tokens)


class History:
    """An index, a cache and the requests that wait, changed at random."""

    def __init__(self, seed: int, page: int, *, by_length: bool = False) -> None:
        self.rng = random.Random(seed)
        self.page, self.by_length = page, by_length
        self.index = WaitingIndex(page, self.rank)
        self.cached = Cached(self.index, page)
        self.waiting: list[Request] = []
        self.arrivals = 0

    def rank(self, request: Request) -> float:
        return request.arrival * CHARGE + (len(request.tokens) if self.by_length else 0)

    def text(self) -> array[int]:
        """Pages of very few kinds, so that texts share beginnings of every length; and a ragged rest."""
        pages = [[kind] * self.page for kind in (1, 2)]
        text = [token for _ in range(self.rng.choice((0, 1, 2, 3, 5, 8, 13))) for token in self.rng.choice(pages)]
        return array("i", [*text, *self.rng.choices((1, 2, 3), k=self.rng.randrange(1, 2 * self.page))])

    def add(self) -> Request:
        self.arrivals += 1
        params = SamplingParams(max_tokens=4, prompt_logprobs=1 if self.rng.random() < 0.1 else None)
        space = self.rng.choice(SPACES)
        call = GenerateCall(
            call_id=str(self.arrivals), prompt=list(self.text()), params=params, salt=space.salt, adapter=space.adapter
        )
        request = Request(call, 0, seed=0, limit=9999, arrival=self.arrivals)
        request.matched = self.match(request)
        self.waiting.append(request)
        self.index.add(request)
        return request

    def remove(self) -> None:
        if self.waiting:
            request = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.index.remove(request)

    def match(self, request: Request) -> int:
        return self.cached.match(request.namespace, request.tokens, request.match_limit)

    def naive(self) -> list[Request]:
        return sorted(self.waiting, key=lambda r: (self.rank(r) - self.match(r), r.arrival))

    def change(self) -> None:
        what = self.rng.random()
        if what < 0.4:
            self.add()
        elif what < 0.6:
            self.remove()
        elif what < 0.8:
            text = self.text()
            if self.waiting and self.rng.random() < 0.7:
                text = self.rng.choice(self.waiting).tokens
                text = text[: self.rng.randint(0, len(text))]
            self.cached.store(self.rng.choice(SPACES), text)
        elif what < 0.98:
            self.cached.evict(self.rng)
        else:
            self.cached.clear(self.rng)


def nodes(index: WaitingIndex) -> Iterator[Node]:
    stack: list[Node] = list(index.trie.roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def check(history: History) -> None:
    """The trie is compressed, covers what is cached, and counts right; heaps stay within twice what they hold."""
    index = history.index
    hanging: dict[Node, int] = {}
    for request in history.waiting:
        node = index._where[request][0]
        hanging[node] = hanging.get(node, 0) + 1
        assert node.end == request.match_limit // history.page * history.page
        assert index.matched(request) == history.match(request)
    for node in nodes(index):
        assert node.own == hanging.get(node, 0)
        assert node.count == node.own + sum(child.count for child in node.children.values())
        assert list(node.lit) == [child for child in node.lit if child.covered]
        assert {*node.lit} == {child for child in node.children.values() if child.covered}
        assert not node.lit or node.covered == len(node.key)
        assert node.own or len(node.children) > 1 or (isinstance(node, Root) and node.children)
        assert all(child.parent is node and child.start == node.end for child in node.children.values())
        assert len(node.heap) <= 2 * (node.own + len(node.children)) + 40
    assert index._places == sum(isinstance(node, Root) or node.covered > 0 for node in nodes(index))
    assert len(index._heap) <= 2 * index._places + 40


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_order_is_the_naive_one(seed: int, by_length: bool, page: int) -> None:
    history = History(seed, page, by_length=by_length)
    for _ in range(250):
        history.change()
        check(history)
        assert [r.id for r in history.index.order()] == [r.id for r in history.naive()]
    for _ in range(len(history.waiting)):
        history.remove()
    assert not history.index.trie.roots
    assert history.index.first() is None


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_an_order_follows_what_changes_while_it_is_read(seed: int, page: int) -> None:
    """Requests start, others come, prefixes are stored and evicted between two that are asked for."""
    history = History(seed, page)
    for _ in range(60):
        for _ in range(6):
            history.change()
        seen: set[Request] = set()
        for request in history.index.order():
            assert request is next(r for r in history.naive() if r not in seen)
            seen.add(request)
            history.change()
            if history.rng.random() < 0.1:
                break  # an order may be left unread
        else:
            assert seen >= {*history.waiting}
        check_restored(history)


def check_restored(history: History) -> None:
    history.index.restore()
    check(history)


def test_an_event_costs_the_same_however_many_requests_hang_below() -> None:
    """Counted in looks at heap entries, which is what all work comes down to."""
    looks = []
    for count in (10, 1000):
        index = WaitingIndex(1, lambda request: float(request.arrival))
        for arrival in range(count):
            call = GenerateCall(call_id=str(arrival), prompt=[*range(100), arrival, 5], params=SamplingParams())
            index.add(Request(call, 0, seed=0, limit=999, arrival=arrival))
        seen = 0
        holds = index._holds

        def counted(*entry: object, holds: object = holds) -> bool:
            nonlocal seen
            seen += 1
            return holds(*entry)  # type: ignore[operator]

        index._holds = counted  # type: ignore[method-assign]
        index.stored(Namespace(), array("i", range(100)), 0)
        assert index.first() is not None
        index.removed(Namespace(), array("i", range(100)), 0)
        looks.append(seen)
    assert looks[0] == looks[1] < 20
