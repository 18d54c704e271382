"""Holds and pins in whole engines, with every kind of state: what they keep is found whole, and is all they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equivalence.harness import engine, greedy, prompts, serve
from phloem.errors import RequestError

# architecture, cache, page size
ROWS = [
    ("llama", "radix", 1),
    ("gemma3", "swa", 1),
    ("mistral", "swa", 1),
    ("gemma3", "swa", 16),
    *((arch, "hybrid", page) for arch in ("lfm2", "mamba2") for page in (1, 16)),
]


@pytest.mark.parametrize(("arch", "use", "page"), ROWS)
def test_holds_and_pins_keep_what_they_need(tiny_model: Callable[[str], Path], arch: str, use: str, page: int) -> None:
    """A held turn and a pinned prompt are found whole after everything else has been evicted.

    Slots, windows and states alike; where each keeps a state, their number is limited, and one too many is refused.
    """
    folder = tiny_model(arch)
    text, pinned, *others = prompts(6, low=64, high=64, shared=0)
    cache = {"use": use, "page_size": page, "tokens": 1024, "pin_share": 0.25}
    cache |= {"window_every": 4096, "snapshot_every": 128}
    schedule = {"max_running": 2, "max_tokens_per_step": 32, "chunk": 16, "hold_share": 0.5}
    with engine(folder, cache=cache, schedule=schedule) as running:
        first = running.generate(text, greedy(40), hold="talk")
        assert running.pin("system", pinned) == len(pinned) // page * page
        for other in others:
            serve(running, folder, [other], 20)
        for group in range(len(running.stats()["groups"])):
            running.core.ledger.cache.evict(10**6, group)
        turn = [*text, *first.token_ids, 5]
        (result,) = serve(running, folder, [turn], 4)
        assert result.usage.cached_tokens == (len(turn) - 2) // page * page
        (result,) = serve(running, folder, [[*pinned, 5]], 4)
        assert result.usage.cached_tokens == len(pinned) // page * page
        names = ["two", "three", "four"]
        for name in names:
            running.pin(name, pinned[: 16 * (1 + len(name) % 3)] + [len(name)] * 16)
        if use == "hybrid":
            with pytest.raises(RequestError, match="each keeps a state"):
                running.pin("five", [9] * 32)
        for name in ("system", *names):
            assert running.unpin(name)
        assert running.drop_hold("talk")
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])
