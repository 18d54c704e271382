"""Cache events: hashes, the feed of a real tree, and mirrors that must know exactly what it holds."""

from __future__ import annotations

import hashlib
import random
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from phloem.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, block_hashes, namespace_hash
from phloem.feed import Feed, Subscription
from phloem.interfaces import PluginContext
from phloem.mirror import Mirror
from phloem.plugins.cache.eviction import Lru
from phloem.plugins.cache.radix import RadixCache
from phloem.plugins.cache.swa import SwaCache
from phloem.request import Namespace
from phloem.testing._cache_rig import CacheRig
from phloem.testing.events import FakePublisher, ToyTree, eventually

HERE = Namespace()
SPACES = (
    HERE,
    Namespace(salt="a"),
    Namespace(adapter="a"),
    Namespace("a", "b"),
    Namespace("ab", ""),
    Namespace("", "ab"),
)


class Rig(CacheRig):
    """A cache under random histories, and a feed that follows it. `asked` is what the feed wants of the loop.

    With a window beside full attention the cache is `swa`.
    """

    def __init__(
        self, *, block: int, page: int = 1, pages: int = 512, backlog: int = 1 << 30, window: int | None = None
    ) -> None:
        plugin = RadixCache if window is None else SwaCache

        def make(context):  # type: ignore[no-untyped-def]
            context.extras["eviction"] = Lru(Lru.Options(), context)
            return plugin(plugin.Options(), context)

        super().__init__(plugin, make, pages, page, (None,) if window is None else (None, window))
        self.asked: list[Callable[[], object]] = []
        self.feed = Feed(self.cache, self.asked.append, block_size=block, backlog=backlog, medium="CPU")
        self.random = random.Random(17)
        self.texts: list[array[int]] = [array("i")]

    def history(self, count: int) -> None:
        """Requests of branching texts in several namespaces; evictions; rarely a reset. A request comes last."""
        longest = 3 * max(self.page_size, self.feed.block_size) + 20
        for left in reversed(range(count)):
            dice = self.random.random() if left else 1.0
            if dice < 0.25:
                self.evict(self.random.randrange(1, self.total // 2))
            elif dice < 0.255:
                self.reset()
            else:
                stem = self.random.choice(self.texts)
                text = stem[: self.random.randrange(len(stem) + 1)]
                text = text + array("i", self.random.choices((1, 2), k=self.random.randrange(1, longest)))
                self.texts = [*self.texts[-30:], text[: self.total // 2]]
                self.holders.clear()
                holder = self.start(self.texts[-1], self.random.choice(SPACES))
                self.compute(holder, len(holder.tokens))
                self.finish(holder)

    def blocks(self) -> dict[bytes, set[bytes]]:
        """The truth: whole blocks of what the naive model knows to be cached."""
        size, held = self.feed.block_size, {}
        for space in SPACES:
            known = [array("i", text) for owner, text in self.known[0] if owner == space]
            keys = {block_hashes(tokens, size, space)[-1] for tokens in known if len(tokens) % size == 0}
            held[namespace_hash(space, size)] = keys
        return {space: keys for space, keys in held.items() if keys}


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and ends their feeds."""
    made: list[Rig] = []

    def make(*, listening: bool = True, **sizes: int) -> Rig:
        made.append(Rig(**sizes))
        if listening:
            made[-1].feed.listen()
        return made[-1]

    yield make
    for rig in made:
        rig.feed.close()


def catch_up(mirror: Mirror, events: Subscription, feed: Feed) -> None:
    """Read on to the last thing that the cache has said."""
    assert eventually(lambda: feed.stats()["backlog"] == 0)
    with feed.lock:
        pass  # the batch that emptied the backlog is out
    while (batch := events.get(0.05)) is not None:
        assert mirror.apply(batch), "a batch is missing"


@pytest.mark.parametrize(
    ("page", "block", "window"),
    [
        *((1, 1, None), (1, 8, None), (1, 64, None), (16, 16, None), (16, 64, None), (4, 8, None)),
        *((1, 4, 6), (16, 16, 24)),
    ],
)
def test_mirrors_know_exactly_what_is_cached(
    rigs: Callable[..., Rig], page: int, block: int, window: int | None
) -> None:
    """From the start, and from the middle on; beside the naive model, and probe by probe beside the tree itself.

    With windows a match may be shorter: what is told is where full attention has its state.
    """
    rig = rigs(page=page, block=block, pages=512 if page == 1 else 128, window=window)
    early, late, first = Mirror(), Mirror(), Subscription(rig.feed, 1 << 20)
    second: Subscription | None = None
    for turn in range(8):
        rig.history(100)
        if turn == 3:
            second = Subscription(rig.feed, 1 << 20)
        catch_up(early, first, rig.feed)
        assert early.spaces == rig.blocks()
        if second is not None:
            catch_up(late, second, rig.feed)
            assert late.spaces == early.spaces
            assert late.seq == early.seq
    assert early.gaps == late.gaps == 0
    assert len(early) > 0
    for text in rig.texts:
        for space in SPACES:
            found = early.longest_prefix(text, space.salt, space.adapter)
            matched = rig.cache.peek(text, len(text), space) // block * block
            assert found == matched if window is None else found >= matched


def test_who_listens_late_is_told_what_is_there(rigs: Callable[..., Rig]) -> None:
    rig = rigs(block=4, listening=False)
    rig.history(300)
    assert rig.feed.stats()["batches"] == 0
    rig.feed.listen()
    mirror = Mirror()
    catch_up(mirror, Subscription(rig.feed, 1 << 20), rig.feed)
    assert mirror.spaces == rig.blocks() != {}


def test_numbers_have_no_gap_and_snapshots_carry_the_number_of_their_state(rigs: Callable[..., Rig]) -> None:
    rig = rigs(block=4)
    seen: list[EventBatch] = []
    first = rig.feed.subscribe(seen.append)
    assert first.events == [AllBlocksCleared()]
    assert first.seq == 0
    rig.history(500)
    catch_up(Mirror(), Subscription(rig.feed, 1 << 20), rig.feed)
    assert [batch.seq for batch in seen] == list(range(1, len(seen) + 1))
    whole = rig.feed.snapshot()
    assert whole.seq == len(seen)
    followed = Mirror()
    for batch in [first, *seen]:
        assert followed.apply(batch)
    jumped = Mirror()
    assert jumped.apply(whole)
    assert jumped.spaces == followed.spaces == rig.blocks()
    assert not jumped.apply(EventBatch(ts=0, events=[], seq=whole.seq + 2, source=whole.source)), "a gap"
    assert not jumped.apply(EventBatch(ts=0, events=[], seq=whole.seq + 1, source="another")), "another life"
    assert jumped.apply(seen[-1]), "an old one does no harm"
    assert jumped.spaces == followed.spaces
    assert jumped.gaps == 2


def test_a_stored_run_has_its_parent_and_its_tokens(rigs: Callable[..., Rig]) -> None:
    rig = rigs(block=4)
    seen: list[EventBatch] = []
    rig.feed.subscribe(seen.append)
    space = Namespace(salt="s", adapter="tuned")
    rig.serve(array("i", range(10)), space)
    assert eventually(lambda: len(seen) == 1)
    rig.serve(array("i", range(17)), space)
    assert eventually(lambda: len(seen) == 2)
    rig.evict(rig.total)
    assert eventually(lambda: len(seen) == 3)
    keys = block_hashes(range(17), 4, space)
    ((begin,), (more,), gone) = (batch.events for batch in seen)
    assert isinstance(begin, BlockStored)
    assert isinstance(more, BlockStored)
    assert (begin.block_hashes, begin.parent_block_hash, begin.token_ids) == (keys[:2], None, list(range(8)))
    assert (more.block_hashes, more.parent_block_hash, more.token_ids) == (keys[2:], keys[1], list(range(8, 16)))
    assert begin.lora_name == "tuned"
    assert begin.namespace == more.namespace == namespace_hash(space, 4)
    removed = [key for event in gone if isinstance(event, BlockRemoved) for key in event.block_hashes]
    assert removed == keys[::-1], "leaves first"


def test_an_overflow_is_counted_and_told_as_a_new_state(rigs: Callable[..., Rig]) -> None:
    """While nobody hashes, the loop goes on and only so much is kept; then subscribers learn the whole state."""
    rig = rigs(block=4, backlog=4000)
    mirror, events = Mirror(), Subscription(rig.feed, 1 << 20)
    rig.history(100)
    catch_up(mirror, events, rig.feed)
    with rig.feed.lock:  # the feed's thread stands still
        rig.history(300)
        assert rig.feed.stats()["backlog"] <= 4000
    assert rig.feed.stats()["overflows"] == 1
    assert eventually(lambda: bool(rig.asked))
    rig.history(50)  # not heard: it will be in what is told anew
    rig.asked.pop()()
    rig.history(2)
    catch_up(mirror, events, rig.feed)
    assert mirror.spaces == rig.blocks() != {}
    assert mirror.gaps == 0
    assert not rig.asked


def test_a_reader_that_falls_behind_gets_the_state_anew(rigs: Callable[..., Rig]) -> None:
    rig = rigs(block=4)
    mirror, slow = Mirror(), Subscription(rig.feed, limit=2)
    for _ in range(20):
        rig.history(20)
        catch_up(Mirror(), Subscription(rig.feed, 1 << 20), rig.feed)
    assert slow.dropped > 2
    batch = slow.get(1.0)
    assert batch is not None
    assert isinstance(batch.events[0], AllBlocksCleared)
    assert mirror.apply(batch)
    rig.history(20)
    catch_up(mirror, slow, rig.feed)
    assert mirror.spaces == rig.blocks() != {}


def test_a_subscriber_that_raises_harms_nobody(rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    def broken(batch: EventBatch) -> None:
        raise ValueError("no")

    rig = rigs(block=1)
    rig.feed.subscribe(broken)
    mirror, events = Mirror(), Subscription(rig.feed, 1 << 20)
    rig.history(50)
    catch_up(mirror, events, rig.feed)
    assert mirror.spaces == rig.blocks() != {}
    assert "a subscriber of cache events raised; it is told no more" in caplog.messages
    assert rig.feed.stats()["subscribers"] == 1


def test_a_publisher_that_ends_badly_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(FakePublisher):
        def stop(self) -> None:
            raise OSError("gone")

    bad = Bad(Bad.Options(), PluginContext("events", "bad"))
    feed = Feed(ToyTree(), lambda work: None, block_size=4, backlog=100, medium="CPU", publisher=bad)  # type: ignore[arg-type]
    feed.start()
    events = Subscription(feed, 10)
    feed.close()
    assert len(list(events)) == 1, "the snapshot, then the end"
    assert "a subscriber of cache events did not end well" in caplog.messages


def test_closing_ends_iterators(rigs: Callable[..., Rig]) -> None:
    rig = rigs(block=1)
    one, other = Subscription(rig.feed, 10), Subscription(rig.feed, 10)
    read: list[EventBatch] = []
    thread = threading.Thread(target=lambda: read.extend(one))
    thread.start()
    rig.serve(array("i", [1, 2, 3]))
    other.close()
    assert rig.feed.stats()["subscribers"] == 1
    rig.feed.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(event) for batch in read for event in batch.events] == [AllBlocksCleared, BlockStored]
    assert [batch.seq for batch in Subscription(rig.feed, 10)] == [1], "made after the end"


# --- hashes


def test_the_bytes_of_a_hash() -> None:
    """Written out as the documentation says, without the code that is tested."""

    def text(part: bytes) -> bytes:
        return struct.pack("<I", len(part)) + part

    start = hashlib.sha256(
        b"phloem.blocks.1" + struct.pack("<I", 2) + text(b"salt") + text("ä".encode()) + text(b"adapter") + text(b"x")
    ).digest()[:16]
    first = hashlib.sha256(start + struct.pack("<2i", 5, 70000)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<2i", 0, 1)).digest()[:16]
    space = Namespace(salt="ä", adapter="x")
    assert namespace_hash(space, 2) == start
    assert block_hashes([5, 70000, 0, 1, 9], 2, space) == [first, second]


def test_keys_of_a_scheme_count_with_all_their_bits(rigs: Callable[..., Rig]) -> None:
    """64-bit keys that agree in their lower half are different blocks."""
    rig = rigs(block=2)
    mirror, events = Mirror(), Subscription(rig.feed, 100)
    for upper in (0, 1, -1):
        rig.feed.stored(HERE, array("q", [(upper << 32) + 7, 8]), 0)
    rig.feed.removed(HERE, array("q", [(1 << 32) + 7, 8]), 0)
    catch_up(mirror, events, rig.feed)
    assert [mirror.longest_prefix(array("q", [(upper << 32) + 7, 8])) for upper in (0, 1, -1)] == [2, 0, 2]
    assert mirror.longest_prefix([7, 8]) == 0, "these are tokens"
    stored = [event.token_ids for event in rig.feed.snapshot().events if isinstance(event, BlockStored)]
    assert stored == [[7, 8], [7 - (1 << 32), 8]]


def test_hashes_stay_what_they_are() -> None:
    """Other programs compute them: these values may never change."""
    assert namespace_hash(HERE, 64).hex() == "5ba411ff20fa13153c87fd7daae715c6"
    assert [key.hex() for key in block_hashes(range(8), 4)] == [
        "6063de89c19609ad060d8f4875e07d73",
        "5240c3cfb2fbfaeec18b93d21c72ec76",
    ]


def test_namespaces_never_share_a_hash() -> None:
    """Whatever their fields are: equal strings in different fields, empty ones, ones that concatenate alike."""
    spaces = [Namespace(a, b) for a in (None, "", "a", "ab", "\udc80") for b in (None, "", "b", "ab", "\udc80")]
    hashes = [set(block_hashes([1] * 64, 4, space)) | {namespace_hash(space, 4)} for space in spaces]
    assert all(len(keys) == 17 for keys in hashes)
    assert not any(one & other for one, other in combinations(hashes, 2))
    assert not set(block_hashes([1] * 64, 4)) & set(block_hashes([1] * 64, 8))
