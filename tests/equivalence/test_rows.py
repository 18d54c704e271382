"""What drafters keep at the target's slots is found where a token's K and V are, whatever the cache does with these.

Ids and positions are kept, and looked at in every step: no rounding hides a row that is another token's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import TOYS, engine, greedy, pairwise, prompts, serve, tiny_reference
from equivalence.tier_rig import crowd, eventually, run, same, text, tier, tiered
from phloem import Engine

COUNT = 16
Tiny = Callable[[str], Path]


def remembers(texts: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]]:
    """The drafter that looks whether its rows are where they should be."""
    return [{"use": f"{TOYS}:Remembers", "texts": [list(text) for text in texts]}]


def drafter_of(running: Engine) -> Any:
    [(_, drafter)] = running.core.parts.drafting.drafters
    return drafter


# architecture and cache, page size, chunk, pool, overlap, host tier
AXES: tuple[list[Any], ...] = (
    [("llama", "radix"), ("gemma3", "swa"), ("mistral", "swa"), ("lfm2", "hybrid"), ("mamba2", "hybrid"),
     ("llama", "chunk")],
    [1, 4], [5, 512], [4096, 220], ["off", "on"], [False, True],
)  # fmt: skip


@pytest.mark.parametrize("combination", pairwise(*AXES))
def test_rows_stay_with_their_tokens(tiny_model: Tiny, combination: tuple[Any, ...]) -> None:
    (arch, cache), page, chunk, pool, overlap, host = combination
    folder, asked = tiny_model(arch), prompts(6)
    reference = tiny_reference(folder)
    texts = [[*prompt, *reference.greedy(prompt, COUNT)[0]] for prompt in asked]
    sections: dict[str, Any] = {
        "cache": {"use": cache, "page_size": page, "tokens": pool},
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap},
        "spec": remembers(texts),
    }
    if host and cache != "chunk":
        sections["cache"]["host"] = {"size": "8MiB"}
    with engine(folder, **sections) as running:
        for _ in range(2):
            serve(running, folder, asked, COUNT)
        running.check()
        stats = running.stats()
        drafter = drafter_of(running)
    assert stats["drafter_failures"] == {}
    assert drafter.looked > 20
    assert stats["accepted_tokens"] > 20


@pytest.mark.parametrize(
    ("arch", "cache", "page"), [("llama", "radix", 4), ("gemma3", "swa", 1), ("lfm2", "hybrid", 1)]
)
def test_rows_of_what_is_held_and_pinned(tiny_model: Tiny, arch: str, cache: str, page: int) -> None:
    """They stay as long as that does, through everything else that comes and goes, and are looked at after it."""
    folder = tiny_model(arch)
    spoken, pinned, *others = prompts(6, low=64, high=64, shared=0)
    below = {"use": cache, "page_size": page, "tokens": 1024, "pin_share": 0.25}
    schedule = {"max_running": 2, "chunk": 16, "hold_share": 0.5}
    with engine(folder, cache=below, schedule=schedule, spec=remembers()) as running:
        first = running.generate(spoken, greedy(COUNT), hold="talk")
        running.pin("system", pinned)
        for other in others:
            serve(running, folder, [other], COUNT)
        for group in range(len(running.stats()["groups"])):
            running.invoke(lambda core, group=group: core.ledger.cache.evict(10**6, group)).result()
        looked = drafter_of(running).looked
        turns = ([*spoken, *first.token_ids, 5], [*pinned, 5])
        for turn in turns:
            (result,) = serve(running, folder, [turn], COUNT)
            assert result.usage.cached_tokens >= (len(turn) - 2) // page * page
        assert running.stats()["drafter_failures"] == {}
        assert drafter_of(running).looked >= looked + 2 * (COUNT - 2)
        running.check()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_no_disk_keeps_rows_that_a_drafter_has_not_written(
    tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, write: str, overlap: str
) -> None:
    """Once it has failed, the next life finds what was stored before, and computes what came after."""
    folder, before, after = tiny_model("llama"), text(71, 200), text(72, 200)
    host = {"size": "64MiB", "write": "back"} if write == "back" else None
    sections: dict[str, Any] = {"host": host, "spec": remembers(), "engine": {"overlap": overlap}}

    def fails(*_: Any) -> None:
        raise RuntimeError("as the test asked for")

    with tiered(folder, tmp_path, **sections) as made:
        run(made, before)
        crowd(made)
        eventually(lambda: tier(made, "disk", "written") >= 3 and not tier(made, "disk", "backlog"))
        drafter_of(made).keep = fails
        run(made, text(73, 100))
        eventually(lambda: not tier(made, "disk", "backlog"))
        written = tier(made, "disk", "written")  # what was evicted for it was whole
        for asked in (after, before):  # what is on the disk is still read
            same(folder, asked, run(made, asked)[0], "without drafts")
        crowd(made)
        told = made.stats()
        assert sum(told["drafter_failures"].values()) == 6, "each request since then"
        assert told["tiers"]["disk"]["written"] == written
        assert told["tiers"]["loads"] > 0
        assert told["tiers"]["disk"]["dropped"] > 0
        assert "nothing more is stored on the disk" in caplog.text
    with tiered(folder, tmp_path, **sections) as made:
        for asked, expected in ((after, 0), (before, 192)):
            got, cached = run(made, asked)
            same(folder, asked, got, "in the next life")
            assert cached == expected
        assert made.stats()["drafter_failures"] == {}
        assert drafter_of(made).looked > 4
