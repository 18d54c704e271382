"""Conformance of kind `observer`: its hooks exist, and a whole life of an engine passes without an exception.

class TestMine(ObserverSuite):
    plugin = MyObserver
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from ..batch import StepStats
from ..hooks import ObserverSet, RequestSummary, hookimpl
from ..interfaces import PluginContext, ServiceInfo
from .plugin import TOY_SPEC, PluginSuite
from .schedule import waiting_request

INFO = ServiceInfo("toy", "/models/toy", TOY_SPEC, 4096, 0.0)


class FakeObserver:
    """Keeps everything it is told, for tests of what tells it: `seen` is a list of (hook, argument)."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """No options."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, options: Options, context: PluginContext) -> None:
        self.seen: list[tuple[str, Any]] = []

    @hookimpl
    def start(self, info: ServiceInfo) -> None:
        """Noted."""
        self.seen.append(("start", info))

    @hookimpl
    def stop(self) -> None:
        """Noted."""
        self.seen.append(("stop", None))

    @hookimpl
    def step(self, stats: StepStats) -> None:
        """Noted."""
        self.seen.append(("step", stats))

    @hookimpl
    def request(self, summary: RequestSummary) -> None:
        """Noted."""
        self.seen.append(("request", summary))


class ObserverSuite(PluginSuite):
    """Plays an engine's life to the observer. Replace `make` where it needs a file or a port."""

    kind = "observer"

    @pytest.fixture(autouse=True)
    def _in_a_folder_of_its_own(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # default options may name a file

    def test_hooks_exist(self) -> None:
        """Every method marked with `hookimpl` is a hook, and there is at least one."""
        ObserverSet([("under test", self.make())])

    @pytest.mark.parametrize("steps", [0, 1, 100])
    def test_survives_a_life(self, steps: int, caplog: pytest.LogCaptureFixture) -> None:
        """Start, steps of all sorts, finished and aborted requests, stop: nothing raises."""
        observers = ObserverSet([("under test", self.make())])
        with caplog.at_level(logging.ERROR, logger="phloem.hooks"):
            observers.start(INFO)
            for i in range(steps):
                observers.step(StepStats(step=i, requests=1, forward_tokens=8, prefill_tokens=8 * (i == 0)))
                request = waiting_request(i)
                request.finish_reason = ["stop", "length", "abort", "error"][i % 4]
                request.first_token_s = float(i % 3)
                observers.request(request)
            observers.stop()
        assert not [record for record in caplog.records if record.name == "phloem.hooks"]
