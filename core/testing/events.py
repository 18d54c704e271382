"""Conformance of kind `events`: what subscribers know equals what the cache holds, and the loop never waits.

class TestMine(EventsSuite):
    plugin = MyPublisher

    def mirror(self, publisher):
        return ...  # a Mirror as a subscriber of this publisher has it now
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from ..events import EventBatch, block_hashes, namespace_hash
from ..feed import Feed
from ..interfaces import CacheListener, PluginContext
from ..mirror import Mirror
from ..request import Namespace
from .plugin import PluginSuite

BLOCK = 4
SPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"), Namespace(salt="a", adapter="b"))


class FakePublisher:
    """Keeps what it is told: `batches`, a snapshot first."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.batches: list[EventBatch] = []

    def start(self, feed: Feed) -> None:
        """The state, and what follows."""
        with feed.lock:
            self.batches.append(feed.subscribe(self.batches.append))

    def stop(self) -> None:
        """Nothing is open."""


class ToyTree:
    """A cache as a feed sees it: whole prefixes that come and go. `held` is the truth."""

    def __init__(self) -> None:
        self.held: dict[Namespace, list[array[int]]] = {space: [] for space in SPACES}
        self.listeners: list[CacheListener] = []
        self._random = random.Random(5)

    def listen(self, listener: CacheListener) -> None:
        """Tell what is there, and what comes."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        for space, texts in self.held.items():
            for i, tokens in enumerate(texts):
                self._tell(listener, "stored", space, tokens, texts[:i])

    def _tell(
        self, to: CacheListener, what: str, space: Namespace, tokens: array[int], beside: list[array[int]]
    ) -> None:
        """Of what `tokens` does not share with the texts beside it."""
        start = max((_common(tokens, other) for other in beside), default=0)
        if start < len(tokens):
            getattr(to, what)(space, tokens[:], start)

    def change(self, count: int) -> None:
        """Random prefixes are stored and removed; rarely all are."""
        for _ in range(count):
            space = self._random.choice(SPACES)
            texts = self.held[space]
            if texts and self._random.random() < 0.4:
                tokens, what = texts.pop(self._random.randrange(len(texts))), "removed"
            else:
                stem = self._random.choice(texts)[: self._random.randrange(30)] if texts else array("i")
                tokens, what = (
                    stem + array("i", self._random.choices((1, 2), k=self._random.randrange(1, 20))),
                    "stored",
                )
            for listener in self.listeners:
                self._tell(listener, what, space, tokens, texts)
            if what == "stored":
                texts.append(tokens)
            if self._random.random() < 0.01:
                self.clear()

    def clear(self) -> None:
        """Everything goes."""
        for texts in self.held.values():
            texts.clear()
        for listener in self.listeners:
            listener.cleared()

    def blocks(self) -> dict[bytes, set[bytes]]:
        """The hashes that a mirror should hold, by namespace."""
        held = {
            namespace_hash(space, BLOCK): {key for tokens in texts for key in block_hashes(tokens, BLOCK, space)}
            for space, texts in self.held.items()
        }
        return {space: keys for space, keys in held.items() if keys}


def _common(a: array[int], b: array[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes true in time; events travel on threads."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class EventsSuite(PluginSuite):
    """A publisher on a feed of a toy tree. Replace `make` where it needs an address, and give `mirror`."""

    kind = "events"
    patience_s: ClassVar[float] = 10.0  # within which subscribers must know

    def mirror(self, publisher: Any) -> Mirror:
        """A mirror as a subscriber of this publisher has it now. Called again and again; may keep what it made.

        What needs it is skipped without it, as by `phloem plugins check`, which cannot know how to subscribe.
        """
        pytest.skip("the suite has no mirror(publisher) to ask what subscribers know")

    @pytest.fixture(autouse=True)
    def _in_a_folder_of_its_own(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # default options may name a file

    @pytest.fixture
    def tree(self) -> ToyTree:
        """What is cached."""
        return ToyTree()

    @pytest.fixture
    def publisher(self, tree: ToyTree) -> Iterator[Any]:
        """The plugin, started on a feed of the tree and stopped in the end."""
        publisher, feed = self._started(tree)
        yield publisher
        feed.close()

    def _started(self, tree: Any) -> tuple[Any, Feed]:
        publisher = self.make()
        asked: list[Callable[[], object]] = []  # nothing is, in so short a life
        feed = Feed(tree, asked.append, block_size=BLOCK, backlog=1 << 30, medium="CPU", publisher=publisher)
        feed.start()
        return publisher, feed

    def _agrees(self, publisher: Any, tree: ToyTree) -> bool:
        return eventually(lambda: self.mirror(publisher).spaces == tree.blocks(), self.patience_s)

    def test_is_made_from_its_options(self) -> None:
        """The constructor takes (options, context); what it opens, `stop` closes, started or not."""
        for _ in range(2):
            self.make().stop()

    def test_subscribers_know_what_is_cached(self, publisher: Any, tree: ToyTree) -> None:
        """After thousands of changes, and at points between."""
        assert self._agrees(publisher, tree)
        for _ in range(10):
            tree.change(300)
            assert self._agrees(publisher, tree)
        tree.clear()
        assert self._agrees(publisher, tree)

    def test_a_late_subscriber_knows_it_too(self, publisher: Any, tree: ToyTree) -> None:
        """The first look is long after the start."""
        tree.change(2000)
        assert any(tree.held.values())
        assert self._agrees(publisher, tree)

    def test_the_loop_never_waits(self, publisher: Any, tree: ToyTree) -> None:
        """Telling costs microseconds, whatever subscribers do."""
        begin = time.perf_counter()
        tree.change(2000)
        assert time.perf_counter() - begin < 2.0, "2000 changes took two seconds of the loop's thread"
        assert self._agrees(publisher, tree)

    def test_a_life_leaves_nothing(self, tree: ToyTree) -> None:
        """After `stop` no thread is left, and the same options serve again."""
        before = set(threading.enumerate())
        for _ in range(3):
            _, feed = self._started(tree)
            tree.change(50)
            feed.close()
            tree.listeners.clear()
            ended = eventually(lambda: set(threading.enumerate()) <= before, self.patience_s)
            assert ended, "a thread outlives stop()"
