"""The built-in publisher and the fake pass the suite that any publisher of cache events can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live import free_port

from phloem.interfaces import PluginContext
from phloem.mirror import Follower, Mirror
from phloem.plugins.events.zmq import ZmqEvents
from phloem.testing import EventsSuite, FakePublisher


class TestFakePublisher(EventsSuite):
    plugin = FakePublisher

    def mirror(self, publisher: Any) -> Mirror:
        mirror = Mirror()
        for batch in list(publisher.batches):
            assert mirror.apply(batch)
        return mirror


class TestZmq(EventsSuite):
    plugin = ZmqEvents

    @pytest.fixture(autouse=True)
    def _addresses(self) -> Iterator[None]:
        self.options = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}  # type: ignore[misc]
        self.followers: dict[int, Follower] = {}
        yield
        for follower in self.followers.values():
            follower.close()

    def make(self) -> Any:
        return ZmqEvents(ZmqEvents.Options(**self.options), PluginContext("events", "zmq"))

    def test_is_made_from_its_options(self) -> None:
        for _ in range(2):  # one after the other: an address has one owner
            self.make().stop()

    def mirror(self, publisher: Any) -> Mirror:
        follower = self.followers.get(id(publisher))
        if follower is None:
            follower = self.followers[id(publisher)] = Follower(publisher.endpoint, publisher.replay, check_s=0.0)
        follower.poll(0.05)
        return follower
