"""How memory is split where layers keep states: the sum in the banner, what fits, and what is refused with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phloem import memory
from phloem.config import load_config
from phloem.errors import ConfigError
from phloem.memory import GIB, MemoryPlan, plan_memory
from phloem.model_spec import GroupSpec, LayerSpec, ModelSpec, StateSpec
from phloem.plugins.cache.hybrid import HybridCache

CPU = torch.device("cpu")
STATE = 2**18  # floats: a MiB


def model(*, attending: int = 0, states: int = 1, floats: int = STATE) -> ModelSpec:
    groups = (*([GroupSpec("full")] if attending else []), GroupSpec("recurrent", "recurrent", draft="chain"))
    layers = (LayerSpec(1, 16, 16),) * attending
    return ModelSpec("toy", 8, 10**5, layers, groups, states=(StateSpec(((floats,),)),) * states)


def plan(of: ModelSpec, monkeypatch: pytest.MonkeyPatch, *, free: int = 64 * GIB, **sections: Any) -> MemoryPlan:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    config = load_config(sections={"spec": [], **sections})
    return plan_memory(config, "hybrid", of, HybridCache.groups(of), 4, CPU, ahead=False, drafters=())


def test_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states and a mark for each of the running, those that the cache keeps, and K and V beside them."""
    made = plan(model(attending=2), monkeypatch, cache={"tokens": 1000}, schedule={"max_running": 8})
    assert made.slots == (1000, 8 * 3 + 4)
    assert (made.snapshots, made.states_each) == (4, 2)
    assert "1,000 tokens x 256 bytes + 28 states (8 requests x 3 + 4 x 0 draft nodes + 4 kept) x 1,048,576" in made.text
    drafting = plan(model(), monkeypatch, cache={"tokens": 1024, "page_size": 16}, spec=[{"use": "ngram"}])
    assert drafting.slots == (1024, 64 * 5 + 4 * 16 + 4)
    assert drafting.text.startswith("388 states (64 requests x 5 + 4 x 16 draft nodes + 4 kept) x 1,048,576 bytes")
    assert "GiB of states" in drafting.text


@pytest.mark.parametrize("attending", [0, 3])
def test_a_size_in_bytes_is_kept_and_used(monkeypatch: pytest.MonkeyPatch, attending: int) -> None:
    size, spec = GIB, model(attending=attending)
    made = plan(spec, monkeypatch, cache={"size": size})
    cost = made.slots[1] * STATE * 4 + made.tokens * (attending * 128 or memory.NUMBER_BYTES)
    assert size - 2 * STATE * 4 < cost <= size
    assert made.slots[1] == 64 * 3 + -(-made.tokens // 256)


def test_large_states_get_more_than_the_usual_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What running requests need at the default of 64 exceeds 4 GiB: twice that is taken where the machine has it."""
    spec = model(states=32)
    made = plan(spec, monkeypatch)
    assert 64 * 3 * 32 / 1024 * GIB > memory.AUTO_MOST_BYTES
    assert made.snapshots > 100
    with pytest.raises(ConfigError, match=r"64 requests x 3 .* not even one page") as caught:
        plan(spec, monkeypatch, free=16 * GIB)
    assert "schedule.max_running" in str(caught.value)
    assert plan(spec, monkeypatch, free=16 * GIB, schedule={"max_running": 8}).snapshots > 10


def test_more_states_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"196 states .* but only 0\.10 GiB are free") as caught:
        plan(model(), monkeypatch, free=GIB // 10, cache={"tokens": 1024})
    assert "lower schedule.max_running or engine.draft_tokens" in str(caught.value)
