"""Every built-in policy passes the suite that any policy can run."""

from __future__ import annotations

from typing import Any, ClassVar

from phloem.plugins.schedule.dfs_weight import DfsWeight
from phloem.plugins.schedule.fcfs import Fcfs
from phloem.plugins.schedule.hrrn import Hrrn
from phloem.plugins.schedule.lof import Lof
from phloem.plugins.schedule.lpm import Lpm
from phloem.plugins.schedule.priority import Priority
from phloem.plugins.schedule.random import Random
from phloem.plugins.schedule.routing_key import RoutingKey
from phloem.plugins.schedule.shortest_prefill import ShortestPrefill
from phloem.testing import ScheduleSuite


class TestLpm(ScheduleSuite):
    plugin = Lpm
    max_overtakes = 512


class TestFcfs(ScheduleSuite):
    plugin = Fcfs
    max_overtakes = 0


class TestLof(ScheduleSuite):
    plugin = Lof
    max_overtakes = 512


class TestShortestPrefill(ScheduleSuite):
    plugin = ShortestPrefill
    max_overtakes = 512


class TestRandom(ScheduleSuite):
    plugin = Random
    options: ClassVar[dict[str, Any]] = {"seed": 7}
    max_overtakes = 512


# The order of the next three is bounded by the scheduler alone, which reads their `max_overtakes`.


class TestDfsWeight(ScheduleSuite):
    plugin = DfsWeight


class TestHrrn(ScheduleSuite):
    plugin = Hrrn


class TestRoutingKey(ScheduleSuite):
    plugin = RoutingKey


class TestPriority(ScheduleSuite):
    """Strict: low priorities may wait for ever."""

    plugin = Priority
