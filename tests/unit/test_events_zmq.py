"""Cache events over ZeroMQ: replays, snapshots, lost messages, restarts, and what a reader of vLLM's events sees."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import zmq
from live import free_port

from phloem import Engine, SamplingParams
from phloem.errors import ConfigError, EngineDeadError, PluginError
from phloem.events import block_hashes
from phloem.feed import Feed
from phloem.interfaces import PluginContext
from phloem.mirror import Follower, Mirror
from phloem.plugins.events.zmq import END, ZmqEvents
from phloem.request import Namespace
from phloem.testing.events import BLOCK, ToyTree, eventually


def places() -> dict[str, str]:
    """Two free addresses."""
    return {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}


class Station:
    """A publisher on a feed of a toy tree."""

    def __init__(self, **options: Any) -> None:
        self.options = {**places(), **options}
        self.tree = ToyTree()
        self.begin()

    def begin(self) -> None:
        """A life of the publisher."""
        self.publisher = ZmqEvents(ZmqEvents.Options(**self.options), PluginContext("events", "zmq"))
        self.feed = Feed(
            self.tree,  # type: ignore[arg-type]
            lambda work: work(),
            block_size=BLOCK,
            backlog=1 << 30,
            medium="CPU",
            publisher=self.publisher,
        )
        self.feed.start()

    def end(self) -> None:
        """Its end."""
        self.feed.close()
        self.tree.listeners.clear()

    def batches(self, count: int) -> None:
        """So many batches more, of a few changes each."""
        for _ in range(count):
            seq = self.feed.seq
            while self.feed.seq == seq:
                self.tree.change(3)
                eventually(lambda: self.feed.stats()["backlog"] == 0)

    def follow(self) -> Follower:
        """A subscriber."""
        return Follower(self.publisher.endpoint, self.publisher.replay, timeout_s=10.0, check_s=0.0)

    def agrees(self, follower: Follower) -> bool:
        """Whether the subscriber comes to know exactly what is cached."""

        def same() -> bool:
            follower.poll(0.02)
            return follower.spaces == self.tree.blocks()

        return eventually(same)


@pytest.fixture
def station() -> Iterator[Callable[..., Station]]:
    with ExitStack() as stack:

        def make(**options: Any) -> Station:
            made = Station(**options)
            stack.callback(made.end)
            return made

        yield make


def ask(station: Station, *frames: bytes) -> list[tuple[int, bytes]]:
    """What the replay socket answers, up to its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(station.publisher.replay)
        asking.send_multipart(list(frames))
        answers = []
        while asking.poll(2000):
            empty, seq, payload = asking.recv_multipart()
            assert empty == b""
            if seq == END:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(seq, "big"), payload))
    raise TimeoutError("no end")


def numbers(station: Station, start: int) -> list[int]:
    return [seq for seq, _ in ask(station, b"", start.to_bytes(8, "big"))]


def test_replays_begin_where_they_are_asked_to(station: Callable[..., Station]) -> None:
    one = station(history=10)
    assert numbers(one, 0) == [0], "a snapshot of nothing"
    assert numbers(one, 1) == []
    one.batches(8)
    assert numbers(one, 1) == list(range(1, 9))
    assert numbers(one, 6) == [6, 7, 8]
    assert numbers(one, 9) == []
    one.batches(7)
    assert numbers(one, 6) == list(range(6, 16))
    for start in (0, 5, 17, 10**9):
        assert numbers(one, start) == [15], "a snapshot: it is not kept, or not there yet"
    ((_, payload),) = ask(one, b"", bytes(8))
    snapshot = msgspec.msgpack.decode(payload)
    assert snapshot["events"][0] == {"type": "AllBlocksCleared"}


def test_without_history_there_are_snapshots(station: Callable[..., Station]) -> None:
    one = station(history=0)
    one.batches(3)
    assert numbers(one, 2) == numbers(one, 0) == [3]
    assert numbers(one, 4) == []


@pytest.mark.parametrize("history", [0, 4, 1024])
def test_lost_messages_are_found_and_fetched(station: Callable[..., Station], history: int) -> None:
    """One in the middle, many, and the last ones, after which nothing comes that would show the gap."""
    one = station(history=history)
    with one.follow() as follower:
        assert one.agrees(follower)
        for lost in (1, 3, 20):
            one.batches(lost)
            assert eventually(lambda: follower._news.poll(0) != 0)
            while follower._news.poll(50):
                follower._news.recv_multipart()
            one.batches(1)
            assert one.agrees(follower)
        assert follower.gaps >= 3
        one.batches(2)
        while follower._news.poll(100):
            follower._news.recv_multipart()
        gaps = follower.gaps
        assert one.agrees(follower)
        assert follower.gaps == gaps


def test_who_comes_late_or_after_a_restart_knows_all(station: Callable[..., Station]) -> None:
    """A new life begins to number anew: a follower of the old one must not take its batches for the next ones."""
    one = station()
    one.batches(12)
    with one.follow() as follower:
        assert one.agrees(follower)
        assert follower.seq == 12
        for more in (2, -1, 0, 1, 30):  # than the follower has seen
            one.end()
            one.tree.clear()
            one.begin()
            one.batches(max(2, follower.seq + more))
            assert one.agrees(follower)
            assert follower.source == one.feed.source
            one.batches(3)
            assert one.agrees(follower)


class VllmEvent(msgspec.Struct, omit_defaults=True):
    """What a reader of vLLM's KV events decodes: fields as its documentation has them."""


class VllmStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class VllmRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def test_a_reader_of_vllms_events_understands(station: Callable[..., Station]) -> None:
    """Frames and fields are what it expects; what is added does it no harm."""
    one = station(topic="kv")
    with zmq.Context() as context, context.socket(zmq.SUB) as news:
        news.linger = 0
        news.subscribe("kv")
        news.connect(one.publisher.endpoint)
        assert eventually(lambda: one.tree.change(5) or news.poll(50))  # type: ignore[func-returns-value]
        seen: set[str] = set()
        expected = None
        while len(seen) < 3:
            one.tree.change(20)
            one.tree.clear()
            topic, seq, payload = news.recv_multipart()
            assert topic == b"kv"
            assert expected is None or int.from_bytes(seq, "big") == expected
            expected = int.from_bytes(seq, "big") + 1
            batch = msgspec.msgpack.decode(payload, type=VllmBatch)
            seen |= {type(event).__name__ for event in batch.events}
            for event in batch.events:
                if isinstance(event, VllmStored):
                    assert event.block_size == BLOCK
                    assert len(event.token_ids) == BLOCK * len(event.block_hashes)


def test_tokens_need_not_be_sent(station: Callable[..., Station]) -> None:
    one = station(tokens=False)
    one.batches(5)
    for start in (0, 1):
        payloads = [msgspec.msgpack.decode(payload) for _, payload in ask(one, b"", start.to_bytes(8, "big"))]
        stored = [event for batch in payloads for event in batch["events"] if event["type"] == "BlockStored"]
        assert stored
        assert all(event["token_ids"] == [] and event["block_hashes"] for event in stored)
    with one.follow() as follower:
        assert one.agrees(follower)


def test_nonsense_is_no_request(station: Callable[..., Station], caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, gets no answer, and the next who asks is answered."""
    one = station()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(one.publisher.replay)
        for frames in ([b"x"], [b"", b"123"], [b"", bytes(8), b""], [b"x", bytes(8)]):
            asking.send_multipart(frames)
        assert eventually(lambda: len(caplog.records) == 4)
        assert not asking.poll(50)
    assert numbers(one, 0) == [0]


def test_addresses_that_cannot_be_had(station: Callable[..., Station]) -> None:
    one = station()
    for option in ("endpoint", "replay"):
        options = ZmqEvents.Options(**{**places(), option: one.options[option]})
        for _ in range(2):  # nothing of the first try stays open
            with pytest.raises(PluginError, match=rf"events.{option}: cannot listen on .*: the address is in use"):
                ZmqEvents(options, PluginContext("events", "zmq"))
    with pytest.raises(PluginError, match="cannot listen on 5557") as refused:
        ZmqEvents(ZmqEvents.Options(endpoint="5557"), PluginContext("events", "zmq"))
    assert refused.value.hint == "expected something like tcp://127.0.0.1:5557"
    with pytest.raises(ValueError, match="each needs an address of its own"):
        ZmqEvents.Options(endpoint="tcp://127.0.0.1:5558")


def test_a_follower_says_when_nobody_answers() -> None:
    with pytest.raises(TimeoutError, match="is it the engine's replay"):
        Follower(*places().values(), timeout_s=0.1)


# --- engines


def test_an_engine_tells_what_it_has(tiny_model: Callable[[str], Any]) -> None:
    at = places()
    events = {"use": "zmq", "block_size": 8, **at}
    greedy = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    with (
        Engine(str(tiny_model("llama")), cache={"tokens": 512}, events=events) as engine,
        Follower(at["endpoint"], at["replay"]) as follower,
    ):
        prompt = list(range(3, 40))
        out = engine.generate(prompt, greedy).token_ids
        engine.generate(prompt, greedy, salt="tenant")
        whole = (len(prompt) + len(out) - 1) // 8 * 8  # the last sampled token was not computed

        def known() -> tuple[int, int, int]:
            follower.poll(0.02)
            text = [*prompt, *out]
            return tuple(follower.longest_prefix(text, salt) for salt in (None, "tenant", "other"))  # type: ignore[return-value]

        assert eventually(lambda: known() == (whole, whole, 0)), known()
        stats = engine.stats()["events"]
        assert stats["blocks"] == len(follower) == 2 * whole // 8
        assert stats["overflows"] == 0
        engine.flush_cache()
        assert eventually(lambda: known() == (0, 0, 0))
        with pytest.raises(PluginError, match="the address is in use"):
            Engine(str(tiny_model("llama")), cache={"tokens": 512}, events=events)
    with Engine(str(tiny_model("llama")), cache={"tokens": 512}, events=events):
        pass  # a closed engine has given its addresses back


def test_an_observer_in_the_process(tiny_model: Callable[[str], Any]) -> None:
    """No configuration is needed, and one that begins late knows all."""
    mirror, called = Mirror(), Mirror()
    engine = Engine(str(tiny_model("llama")), cache={"tokens": 528, "page_size": 48})
    try:
        prompt = list(range(3, 200))
        engine.generate(prompt, SamplingParams(max_tokens=2))
        assert engine.stats()["events"]["batches"] == 0, "nobody has asked"
        end = engine.on_cache_events(called.apply)  # type: ignore[arg-type]
        with engine.cache_events() as events:
            assert mirror.apply(next(events))
            while mirror.longest_prefix(prompt) < 192:
                assert mirror.apply(next(events))
            assert mirror.block_size == 96, "whole pages"
            assert mirror.spaces == called.spaces
            assert set(block_hashes(prompt, 96)) == mirror.spaces[next(iter(mirror.spaces))]
            end()
            engine.flush_cache()
            assert mirror.apply(next(events))
            assert len(mirror) == 0 < len(called)
    finally:
        engine.close()
    with pytest.raises(EngineDeadError):
        engine.cache_events()


class Held:
    """Listens once: the blocks of all that is cached."""

    def __init__(self, block: int) -> None:
        self.block, self.keys = block, set[bytes]()

    def stored(self, namespace: Namespace, tokens: Any, start: int) -> None:
        self.keys |= set(block_hashes(tokens, self.block, namespace))

    def removed(self, *_: Any) -> None:
        """Nothing is."""

    def cleared(self) -> None:
        """Nothing is."""


@pytest.mark.parametrize(
    ("arch", "cache", "page"),
    [("llama", "radix", 16), ("gemma3", "swa", 1), ("gemma3", "swa", 16), ("mistral", "swa", 1)],
)
def test_a_mirror_is_true_after_a_busy_life(tiny_model: Callable[[str], Any], arch: str, cache: str, page: int) -> None:
    """Chunks, evictions, retractions, aborts and salts in a small pool: what was told is what the tree says."""
    sections: dict[str, Any] = {"schedule": {"chunk": 32, "max_running": 8}, "engine": {"check": True}}
    pool = {"use": cache, "tokens": 320, "page_size": page}
    mirror, dice = Mirror(), random.Random(page)
    with Engine(str(tiny_model(arch)), cache=pool, events={"block_size": 16}, **sections) as engine:
        with engine.cache_events() as events:
            for _ in range(4):
                calls = []
                for i in range(10):
                    stem = [3 + dice.randrange(3)] * dice.randrange(1, 60)
                    calls.append([*stem, *dice.choices(range(9, 200), k=dice.randrange(1, 40)), i])
                salt = dice.choice([None, "a"])
                engine.generate(calls, SamplingParams(max_tokens=24, ignore_eos=True), salt=salt)
                for _ in zip(range(3), engine.stream(calls[0], SamplingParams(max_tokens=99)), strict=False):
                    pass  # and left
            held = Held(16)
            engine.invoke(lambda core: core.ledger.cache.listen(held)).result()
            while (batch := events.get(0.3)) is not None:
                assert mirror.apply(batch)
        assert mirror.gaps == 0
        assert engine.stats()["evicted_tokens"] > 0
        assert set().union(*mirror.spaces.values()) == held.keys != set()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache": "chunk", "events": "zmq"}, "'zmq' needs cache with sharing; cache 'chunk' has none"),
        ({"events": "zqm"}, r"no events plugin is named 'zqm' \(did you mean 'zmq'\?\)"),
        (
            {"events": {"block_size": 24}, "cache": {"page_size": 16, "tokens": 512}},
            "24 is no multiple .* use 16 or 32",
        ),
        ({"events": {"block_size": 8}, "cache": {"page_size": 16, "tokens": 512}}, "8 is no multiple .* use 16"),
        ({"events": {"use": "zmq", "replay": "tcp://127.0.0.1:5557"}}, "each needs an address of its own"),
        ({"events": {"endpoint": "tcp://127.0.0.1:5557"}}, "events.endpoint: unknown key"),
    ],
)
def test_what_cannot_be_is_refused(tiny_model: Callable[[str], Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(str(tiny_model("llama")), **sections)


def test_a_namespace_hash_tells_no_salt(station: Callable[..., Station]) -> None:
    """The salt of a tenant is not to be read off the wire."""
    one = station()
    one.feed.stored(Namespace(salt="secret-of-a-tenant"), array("i", range(8)), 0)
    assert eventually(lambda: one.feed.seq == 1)
    assert b"secret" not in ask(one, b"", bytes(8))[0][1]
