"""slowlog keeps the promises of every observer, and its own."""

from __future__ import annotations

import logging

import pytest
from phloem_slowlog import Slowlog

from phloem.batch import StepStats
from phloem.testing import ObserverSuite


class TestSlowlog(ObserverSuite):
    plugin = Slowlog

    def test_names_what_is_slow(self, caplog: pytest.LogCaptureFixture) -> None:
        """A slow step is a warning, a fast one is silent."""
        observer = self.make()
        with caplog.at_level(logging.INFO, logger="phloem.slowlog"):
            observer.step(StepStats(step=1, forward_s=0.1))
            observer.step(StepStats(step=2, forward_s=5.0, forward_tokens=7))
            observer.stop()
        assert caplog.messages == ["step 2 took 5.00 s for 7 tokens", "0 slow requests, 1 slow steps"]
