"""short-first keeps the promises of every schedule policy, and its own."""

from __future__ import annotations

from phloem_short_first import ShortFirst

from phloem.interfaces import PluginContext
from phloem.testing import ScheduleSuite
from phloem.testing.schedule import waiting_request


class TestShortFirst(ScheduleSuite):
    plugin = ShortFirst
    max_overtakes = 200

    def test_less_to_compute_goes_first(self) -> None:
        """Cached tokens count as done."""
        long, short = waiting_request(0, prompt=900), waiting_request(1, prompt=100)
        cached = waiting_request(2, prompt=900, matched=899)
        assert list(self.make().order([long, short, cached])) == [cached, short, long]

    def test_patience_is_an_option(self) -> None:
        """Without patience it is first come, first served."""
        policy = ShortFirst(ShortFirst.Options(patience=1), PluginContext("schedule", "short-first"))
        requests = [waiting_request(0, prompt=900), waiting_request(1, prompt=1)]
        assert list(policy.order(requests)) == requests
