"""Host memory and disk below the cache: the plain engine's tokens, whatever was evicted, restarted, torn or refused.

Every test also says how many tokens were cached: tiers that never give anything back are equal too.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine, SamplingParams, loop, tier_blocks, tier_loads, tier_shelf, tiers
from phloem.events import block_hashes
from phloem.request import Namespace

from .harness import engine, greedy, pairwise
from .tier_rig import (
    BLOCK,
    FAULTY,
    OUT,
    POOL,
    Loading,
    crowd,
    device,
    eventually,
    loading,
    run,
    same,
    stored,
    text,
    tier,
    tiered,
    whole,
)

ROOT = Path(__file__).parents[2]
Tiny = Callable[[str], Path]


# --- cold, from host memory, from disk, after a restart

MODELS = [("llama", "radix"), ("gemma3", "radix"), ("gemma3", "swa"), ("lfm2", "hybrid"), ("mamba2", "hybrid")]
AXES = (
    MODELS,
    [1, 4, 16],
    [("host", "through"), ("host", "hot"), ("host", "back"), ("host+disk", "back"), ("disk", "through")],
    ["off", "on"],
)
CASES = pairwise(*AXES)


@pytest.mark.parametrize(("model", "page", "tiers", "overlap"), CASES)
def test_tokens_and_hits(
    tiny_model: Tiny, tmp_path: Path, model: tuple[str, str], page: int, tiers: tuple[str, str], overlap: str
) -> None:
    check_tokens_and_hits(tiny_model, tmp_path, model, page, tiers, overlap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "page", "tiers", "overlap"), [case for case in itertools.product(*AXES) if case not in CASES]
)
def test_tokens_and_hits_of_all(
    tiny_model: Tiny, tmp_path: Path, model: tuple[str, str], page: int, tiers: tuple[str, str], overlap: str
) -> None:
    check_tokens_and_hits(tiny_model, tmp_path, model, page, tiers, overlap)


def check_tokens_and_hits(
    tiny_model: Tiny, tmp_path: Path, model: tuple[str, str], page: int, tiers: tuple[str, str], overlap: str
) -> None:
    """Cold, evicted, and after a restart where there is a disk: prompts come back to their last whole block."""
    (arch, use), (where, write) = model, tiers
    path, kv = tiny_model(arch), tmp_path / "kv" if "disk" in where else None
    host = {"size": "64MiB", "write": write} if "host" in where else None
    sections: Any = {"cache": {"use": use, "page_size": page}, "engine": {"overlap": overlap}}
    if write == "hot":
        sections["cache"]["snapshot_every"] = 32  # what the pool has lost before the second request is lost
    prompts = [text(1, 300), text(2, 290, shared=200), text(3, 257, shared=200)]
    with tiered(path, kv, host=host, **sections) as made:
        for prompt in prompts:
            for _ in range(1 + (write == "hot")):
                same(path, prompt, run(made, prompt)[0], "cold")
        crowd(made)
        if kv is not None:
            eventually(lambda: not tier(made, "disk", "backlog"))
        for prompt in prompts:
            got, cached = run(made, prompt)
            same(path, prompt, got, "evicted")
            assert cached >= whole(prompt)
        told = made.stats()["tiers"]
        assert told["loads"] > 0
        assert told["failed"] == 0
        assert told["loaded_tokens"] >= 256
        assert all(group["protected"] == group["leased"] == 0 for group in made.stats()["groups"])
    if kv is None:
        return
    with tiered(path, kv, host=host, **sections) as made:
        for prompt in prompts:
            got, cached = run(made, prompt)
            same(path, prompt, got, "after a restart")
            assert cached >= whole(prompt)
        assert tier(made, "disk", "read") > 0
        assert made.stats()["prefill_tokens"] <= sum(len(prompt) - whole(prompt) for prompt in prompts)


def test_a_load_goes_to_the_last_useful_token(tiny_model: Tiny) -> None:
    """Blocks are whole, but a prompt of blocks is used to its last token but one."""
    path, prompt = tiny_model("llama"), text(5, 4 * BLOCK)
    with tiered(path) as made:
        run(made, prompt)
        crowd(made)
        got, cached = run(made, prompt)
        same(path, prompt, got, "loaded")
        assert cached == 4 * BLOCK - 1


def test_a_load_goes_on_where_the_pool_ends(tiny_model: Tiny) -> None:
    """What is evicted of a path's end is loaded behind what is still there."""
    path, prompt = tiny_model("llama"), text(6, 300)
    with tiered(path) as made:
        run(made, prompt)
        made.invoke(lambda core: core.ledger.cache.evict(130)).result()
        got, cached = run(made, prompt)
        same(path, prompt, got, "in part")
        assert cached == 256
        assert 0 < made.stats()["tiers"]["loaded_tokens"] < 256


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
def test_a_window_that_was_gone_is_not_taken_for_one(tiny_model: Tiny, arch: str) -> None:
    """Of a long answer only the end has its window; its other blocks are kept without, and no load may end in them.

    Until they have been computed once more: then they are kept with it.
    """
    path, prompt = tiny_model(arch), text(16, 140)
    with tiered(path, cache={"use": "swa"}, schedule={"chunk": 24, "max_tokens_per_step": 24}) as made:
        whole_text = [*prompt, *made.generate(prompt, greedy(160)).outputs[0].token_ids]
        found = []
        for length in (130, 141, 200, 200, 300, 300):
            made.invoke(lambda core: core.ledger.cache.reset()).result()
            got, cached = run(made, whole_text[:length])
            same(path, whole_text[:length], got, f"the first {length}")
            found.append(cached)
        assert found == [128, 128, 128, 192, 192, 256]


@pytest.mark.parametrize("write", ["through", "back"])
def test_windows_that_are_computed_again_heal_what_is_stored(tiny_model: Tiny, tmp_path: Path, write: str) -> None:
    """On the disk as well, in another life than the one that had lost them: each block is written twice at most."""
    path, prompt = tiny_model("gemma3"), text(17, 140)
    sections: dict[str, Any] = {"cache": {"use": "swa"}, "schedule": {"chunk": 24, "max_tokens_per_step": 24}}
    sections["host"] = {"size": "64MiB", "write": "back"} if write == "back" else None

    def stop(made: Engine) -> None:
        made.invoke(lambda core: core.ledger.cache.evict(10**6)).result()
        eventually(lambda: not tier(made, "disk", "backlog"))

    with tiered(path, tmp_path, **sections) as made:
        whole_text = [*prompt, *made.generate(prompt, greedy(160)).outputs[0].token_ids]
        stop(made)
        assert tier(made, "disk", "written") == 4
    for expected, written in ((128, 2), (256, 0)):
        with tiered(path, tmp_path, **sections) as made:
            for again in range(2):
                got, cached = run(made, whole_text[:299])
                same(path, whole_text[:299], got, f"expected {expected}")
                assert cached == (256 if again else expected)
                stop(made)
            assert tier(made, "disk", "written") == written


def test_only_what_was_found_again_is_hot(tiny_model: Tiny) -> None:
    path, often, once = tiny_model("llama"), text(7, 200), text(8, 200)
    with tiered(path, host={"size": "64MiB", "write": "hot"}) as made:
        for prompt in (often, often, once):
            run(made, prompt)
        crowd(made)
        assert run(made, often)[1] == 192
        assert run(made, once)[1] == 0


def test_its_own_text_makes_no_request_hot(tiny_model: Tiny) -> None:
    """It finds it when it comes back after a retraction."""
    path, prompt = tiny_model("llama"), text(68, 200)
    with tiered(path, host={"size": "64MiB", "write": "hot"}) as made:
        stream = made.stream(prompt, greedy(40))
        next(stream)
        made.invoke(lambda core: core.scheduler.retract(core.scheduler.running[0])).result()
        assert sum(len(delta.outputs[0].token_ids) for delta in stream) == 39
        assert tier(made, "host", "stored") == 0
        run(made, prompt)
        assert tier(made, "host", "stored") == 3


def test_an_orderly_end_saves_all_that_a_cache_writes_back(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little may wait to be written."""
    monkeypatch.setattr(tier_shelf, "BACKLOG", 2 * BLOCK * 800)
    path, back = tiny_model("llama"), {"size": "64MiB", "write": "back"}
    prompts = [text(14, 250), text(15, 230)]
    with tiered(path, tmp_path, host=back) as made:
        for prompt in prompts:
            run(made, prompt)
        assert tier(made, "disk", "written") == 0
    with tiered(path, tmp_path, host=back) as made:
        assert [run(made, prompt)[1] for prompt in prompts] == [192, 192]


def test_companions_load_a_prefix_once(tiny_model: Tiny) -> None:
    path, prompt = tiny_model("llama"), text(9, 280)
    with tiered(path) as made:
        run(made, prompt)
        crowd(made)
        results = made.generate([prompt, prompt, [*prompt, 5, 6, 7]], greedy(OUT))
        assert [result.usage.cached_tokens >= 256 for result in results] == [True] * 3
        same(path, prompt, results[1].outputs[0].token_ids, "a companion")
        assert made.stats()["tiers"]["loads"] == 1


def test_flushing_empties_memory_and_leaves_the_disk(tiny_model: Tiny, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama"), text(10, 200)
    with tiered(path) as made:
        run(made, prompt)
        made.flush_cache()
        assert run(made, prompt)[1] == 0
    with tiered(path, tmp_path) as made:
        run(made, prompt)
        stored(made, 3)
        made.flush_cache()
        assert tier(made, "host", "bytes") == 0
        assert run(made, prompt)[1] == 192


# --- namespaces and keys


def test_namespaces_share_no_block(tiny_model: Tiny, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama"), text(11, 200)
    for life in range(2):
        with tiered(path, tmp_path) as made:
            for salt in (None, "a", "b"):
                got, cached = run(made, prompt, salt=salt)
                same(path, prompt, got, f"salt {salt}")
                assert cached == (192 if life and salt != "b" else 0)
                if salt == "a":
                    crowd(made)
            stored(made, 3)
            if not life:  # what the second life is to find of "b" goes
                names = made.invoke(lambda core: core.ledger.tiers._shelf._writing).result()
                eventually(lambda names=names: not names)
                forget(made, prompt, "b")


def forget(made: Engine, prompt: list[int], salt: str) -> None:
    """Delete what the disk has of a text."""
    for name in block_hashes(array("i", prompt), BLOCK, Namespace(salt=salt)):
        assert device(made).holds(name)
        device(made).reject(name)


def test_keys_in_place_of_tokens(tiny_model: Tiny, tmp_path: Path) -> None:
    """Blocks are named by keys, and a store belongs to a key scheme."""
    path, prompt = tiny_model("llama"), [*text(12, 150), 3, *text(13, 100)]
    scheme = ROOT / "examples" / "plugins" / "phloem-private-tail" / "phloem_private_tail.py"
    sections: Any = {"cache": {"key": {"use": f"{scheme}:PrivateTail", "marker": "<|im_end|>"}}}
    with tiered(path, tmp_path, **sections) as made:
        for key, cached in (("x", 0), ("y", 128), ("x", 192)):
            made.flush_cache()
            got, found = run(made, prompt, routing_key=key)
            same(path, prompt, got, f"client {key}")
            assert found == cached
            eventually(lambda: not tier(made, "disk", "backlog"))
    with tiered(path, tmp_path, **sections) as made:  # this scheme's private keys are of one process
        assert run(made, prompt, routing_key="x")[1] == 128
    with tiered(path, tmp_path) as made:
        assert run(made, prompt)[1] == 0


# --- budgets


def test_the_least_recently_used_prefix_leaves_the_host(tiny_model: Tiny) -> None:
    path = tiny_model("llama")
    with tiered(path, host=11 * BLOCK * 768 + 11 * 256) as made:
        for seed in (21, 22):
            run(made, text(seed, 200))
        crowd(made)
        assert tier(made, "host", "bytes") <= 11 * (BLOCK * 768 + 256)
        assert tier(made, "host", "evicted") > 0
        assert run(made, text(903, 300))[1] >= 256
        assert run(made, text(21, 200))[1] == 0


def test_of_a_prefix_the_end_goes_first(tiny_model: Tiny) -> None:
    """So that what is left of it is of use."""
    path, prompt = tiny_model("llama"), text(23, 400)
    with tiered(path, host=8 * (BLOCK * 768 + 256)) as made:
        run(made, prompt)
        run(made, text(24, 300))
        made.invoke(lambda core: core.ledger.cache.reset()).result()
        assert run(made, prompt)[1] == 4 * BLOCK


@pytest.mark.parametrize("where", ["host", "disk", "host of two"])
def test_of_a_prefix_larger_than_a_tier_the_beginning_stays(tiny_model: Tiny, tmp_path: Path, where: str) -> None:
    """However often it is asked for; and nothing is copied again for it."""
    path, prompt, four = tiny_model("llama"), text(69, 420), 4 * (BLOCK * 768 + 600)
    kv = tmp_path if where != "host" else None
    sections: Any = {"disk": {"size": four}} if where == "disk" else {}
    with tiered(path, kv, host=None if where == "disk" else four, **sections) as made:
        for again in range(3):
            assert run(made, prompt)[1] == (0 if not again else 384 if where == "host of two" else 256)
            if kv is not None:
                eventually(lambda: not tier(made, "disk", "backlog"))
            if where != "disk":
                names = made.core.ledger.tiers._shelf._kept  # type: ignore[union-attr]
                keys = made.core.ledger.tiers._chain([], array("i", prompt), Namespace())  # type: ignore[union-attr]
                assert {*names} == {*keys[:4]}
            made.invoke(lambda core: core.ledger.cache.reset()).result()
        copied = tier(made, "host", "stored") if kv is None else tier(made, "disk", "written")
        assert copied == (6 if where == "host of two" else 4)


# --- failures cost a computation


@pytest.mark.parametrize(
    ("arch", "use", "drafter", "policy"),
    [
        ("llama", "radix", "ngram", "priority"),
        ("gemma3", "swa", "suffix", "dfs-weight"),
        ("llama", "radix", "draft", "lpm"),
    ],
)
def test_drafters_and_policies(tiny_model: Tiny, arch: str, use: str, drafter: str, policy: str) -> None:
    """What was loaded is drafted behind as what was computed; constrained texts find it, too."""
    path, prompts = tiny_model(arch), [text(1, 300), text(2, 290, shared=200)]
    model = {"model": str(path)} if drafter == "draft" else {"min_match": 1}
    sections: Any = {"cache": {"use": use}, "schedule": {"use": policy}, "spec": [{"use": drafter, **model}]}
    sections["grammar"] = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
    masked = SamplingParams(temperature=0.0, max_tokens=OUT, regex="[a-z]+")
    with tiered(path, None, host={"size": "64MiB", "write": "through"}, **sections) as made:
        cold = [made.generate(prompt, masked).token_ids for prompt in prompts]
        for prompt in prompts:
            same(path, prompt, run(made, prompt)[0], "cold")
        for round_ in ("plain", "masked"):
            crowd(made)
            for prompt, constrained in zip(prompts, cold, strict=True):
                if round_ == "plain":
                    got, cached = run(made, prompt)
                    same(path, prompt, got, "loaded")
                else:
                    result = made.generate(prompt, masked)
                    assert result.token_ids == constrained
                    cached = result.usage.cached_tokens
                assert cached >= whole(prompt)
        told = made.stats()
        assert told["tiers"]["loads"] > 0
        assert told["draft_tokens"] > 0
        assert told["drafter_failures"] == {}
        made.check()


@pytest.mark.parametrize("fault", ["write", "read", "torn", "corrupt", "empty", "holds", "touch", "stats", "reject"])
def test_a_device_that_fails(
    tiny_model: Tiny, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Disk full, torn writes, corrupt blocks, and methods of a storage that raise: a line of log and a counter."""
    monkeypatch.setattr(tier_shelf, "_REST_S", 0.0)
    path, prompt = tiny_model("llama"), text(31, 300)
    faults = ("corrupt", "reject") if fault == "reject" else (fault,)
    with tiered(path, tmp_path, storage=FAULTY, host=None, disk={"faults": faults}) as made:
        same(path, prompt, run(made, prompt)[0], "cold")
        crowd(made)
        eventually(lambda: not tier(made, "disk", "backlog"))
        got, cached = run(made, prompt)
        same(path, prompt, got, fault)
        assert cached == (256 if fault in ("stats", "touch") else 0)
        told = made.stats()["tiers"]
        assert told["failed"] == (fault not in ("write", "holds", "stats", "touch"))  # and is not tried again
        assert told["disk"]["failures"] > 0 or told["disk"]["corrupt"] > 0
        assert "tiers: " in caplog.text
        device(made).faults.clear()
        for _ in range(2):  # what was refused is written again
            crowd(made)
            eventually(lambda: not tier(made, "disk", "backlog"))
            got, cached = run(made, prompt)
            same(path, prompt, got, "mended")
        assert cached == 256


def test_a_slow_device_holds_up_nobody_else(tiny_model: Tiny, tmp_path: Path) -> None:
    path, prompt, other = tiny_model("llama"), text(32, 300), text(33, 100)
    with loading(path, tmp_path, prompt) as (made, result):
        same(path, other, run(made, other)[0], "beside a load")
        assert not result.done
        assert made.stats()["waiting"] == 1
        assert all(group["leased"] == 0 for group in made.stats()["groups"])
        device(made).gate.set()
        result.thread.join(20)
        same(path, prompt, result.tokens, "slow")
        assert result.cached == 256


def test_who_waits_for_a_device_is_overtaken_within_the_bound(tiny_model: Tiny, tmp_path: Path) -> None:
    """Then it computes, long before the device is given up."""
    path, prompt = tiny_model("llama"), text(74, 300)
    with loading(path, tmp_path, prompt, schedule={"max_overtakes": 4}) as (made, result):
        for seed in range(4):
            run(made, text(200 + seed, 40))
            assert not result.done
        run(made, text(210, 40))
        result.thread.join(20)
        same(path, prompt, result.tokens, "computed")
        assert result.cached == 0
        assert made.stats()["tiers"]["loading"] == 1, "nobody has answered yet"


def test_a_device_that_hangs_costs_a_computation(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_LOAD_WAIT_S", 0.001)
    path, prompt = tiny_model("llama"), text(34, 300)
    with loading(path, tmp_path, prompt) as (made, result):
        result.thread.join(20)
        same(path, prompt, result.tokens, "computed")
        assert result.cached == 0
        device(made).gate.set()
        eventually(lambda: not made.stats()["tiers"]["loading"])


def test_what_hangs_is_given_up_and_asked_for_nothing_more(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing queues behind it, nothing is reserved for it, and an engine without work waits for work."""
    monkeypatch.setattr(tier_loads, "READ_S", 0.3)
    path, prompt = tiny_model("llama"), text(61, 300)
    with loading(path, tmp_path, prompt) as (made, result):
        result.thread.join(20)
        same(path, prompt, result.tokens, "given up")
        loads = made.core.ledger.tiers.loads  # type: ignore[union-attr]
        assert (result.cached, loads.open, loads.reserved, loads.late) == (0, {}, 0, True)
        made.flush_cache()
        assert run(made, prompt)[1] == 0
        assert made.stats()["tiers"]["failed"] == 1, "it is not asked again"
        device(made).gate.set()
        eventually(lambda: not loads.late)
        made.flush_cache()
        assert run(made, prompt)[1] == 256
        assert device(made).reads == 1 + 4, "of what was given up, no more than was under way"


def test_what_is_in_memory_waits_for_no_device(tiny_model: Tiny, tmp_path: Path) -> None:
    path, hung, here = tiny_model("llama"), text(62, 420), text(63, 300)
    with tiered(path, tmp_path, storage=FAULTY) as made:
        run(made, hung)
        stored(made, 6)
        made.flush_cache()
        run(made, here)
        made.invoke(lambda core: core.ledger.cache.reset()).result()
        device(made).gate.clear()
        result = Loading(made, hung)
        got, cached = run(made, here)
        same(path, here, got, "beside a device that hangs")
        assert cached == 256
        assert not result.done
        device(made).gate.set()
        result.thread.join(20)
        same(path, hung, result.tokens, "after all")


def test_whoever_else_waits_gets_what_the_first_has_left(tiny_model: Tiny, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama"), text(64, 300)
    with loading(path, tmp_path, prompt) as (made, first):
        second = Loading(made, prompt)
        eventually(lambda: len(next(iter(made.core.ledger.tiers.loads.open.values())).waiting) == 2)  # type: ignore[union-attr]
        made.invoke(lambda core: core.abort_now(first.call_id)).result()
        first.thread.join(20)
        device(made).gate.set()
        second.thread.join(20)
        same(path, prompt, second.tokens, "the second")
        assert second.cached == 256


@pytest.mark.parametrize("write", ["through", "hot", "back"])
def test_a_copy_that_fails_costs_the_copy(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: Any, write: str
) -> None:
    """No memory for it, on either side."""

    def read(*_: Any) -> None:
        raise MemoryError("as the test asked for")

    monkeypatch.setattr(tier_blocks.Rows, "read", read)
    path, prompt = tiny_model("llama"), text(65, 300)
    with tiered(path, host={"size": "64MiB", "write": write}) as made:
        for what in ("cold", "again"):
            same(path, prompt, run(made, prompt)[0], what)
        crowd(made)
        same(path, prompt, run(made, prompt)[0], "evicted")
        assert tier(made, "host", "failures") > 0
        assert tier(made, "host", "blocks") == 0
    assert "copying out failed: MemoryError" in caplog.text


@pytest.mark.parametrize("hangs", ["read", "write"])
def test_an_end_takes_as_long_as_it_says(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """All of it, whatever hangs."""
    monkeypatch.setattr(tiers, "PATIENCE_S", 1.0)
    monkeypatch.setattr(tier_shelf, "BACKLOG", 2 * BLOCK * 800)  # so that saving, too, waits for the device
    path, back = tiny_model("llama"), {"size": "64MiB", "write": "back"}
    with engine(path, cache={"tokens": POOL, "host": back, "disk": disk(tmp_path)}) as made:
        run(made, text(66, 300))
        gate = threading.Event()
        below: Any = made.core.ledger.tiers
        if hangs == "read":
            below.loads._reader.submit(lambda: gate.wait(60))
            below.loads._filler.submit(lambda: gate.wait(60))
        else:
            monkeypatch.setattr(device(made), "write", lambda *_: gate.wait(60))
        begin = time.monotonic()
        below.close(clean=True)
        assert time.monotonic() - begin < 1.6
        made.core.ledger.tiers = None
        gate.set()


def disk(path: Path) -> dict[str, Any]:
    return {"use": FAULTY, "path": str(path), "size": "64MiB"}


@pytest.mark.parametrize("what", ["abort", "retract", "flush", "evict"])
def test_what_happens_while_a_load_is_under_way(tiny_model: Tiny, tmp_path: Path, what: str) -> None:
    path, prompt = tiny_model("llama"), [*text(35, 100), *text(36, 200)]
    with loading(path, tmp_path, prompt, kept=text(35, 100)) as (made, result):
        if what == "abort":
            made.invoke(lambda core: core.abort_now(result.call_id)).result()
            result.thread.join(20)
        elif what == "retract":
            stream = made.stream(text(37, 100), greedy(40))
            next(stream)
            made.invoke(lambda core: core.scheduler.retract(core.scheduler.running[0])).result()
            assert sum(len(delta.outputs[0].token_ids) for delta in stream) == 39
        else:
            made.invoke(lambda core: core.ledger.cache.reset() if what == "flush" else core.ledger.cache.evict(POOL))
        made.check()
        device(made).gate.set()
        result.thread.join(20)
        eventually(lambda: not made.stats()["tiers"]["loading"])
        made.check()
        if what == "abort":
            assert made.stats()["groups"][0]["protected"] == 0
        else:
            same(path, prompt, result.tokens, what)
        assert run(made, prompt)[1] >= 256


def test_a_flush_ends_what_is_being_read(tiny_model: Tiny, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama"), text(67, 300)
    with loading(path, tmp_path, prompt) as (made, result):
        made.flush_cache()
        result.thread.join(20)
        same(path, prompt, result.tokens, "computed")
        assert result.cached == 0
        device(made).gate.set()
        assert made.stats()["tiers"]["loads"] == 0


@pytest.mark.parametrize("what", ["look", "abort", "fail", "flush"])
def test_what_happens_while_slots_are_being_filled(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """They are accounted for, come back where that fails, and nobody else waits for them."""
    path, prompt, other = tiny_model("llama"), text(38, 300), text(39, 60)
    with tiered(path) as made:
        run(made, prompt)
        crowd(made)
        assert made.core.ledger.tiers is not None
        loads, gate = made.core.ledger.tiers.loads, threading.Event()
        fill = loads._fill

        def wait(ticket: Any) -> None:
            gate.wait(20)
            if what == "fail":
                raise RuntimeError("the copy failed, as the test asked for")
            fill(ticket)

        monkeypatch.setattr(loads, "_fill", wait)
        result = Loading(made, prompt)
        same(path, other, run(made, other)[0], "beside a fill")
        made.check()
        group = made.stats()["groups"][0]
        assert group["leased"] == 256
        if what in ("abort", "flush"):
            made.invoke(lambda core: core.abort_now(result.call_id)).result()
        if what == "flush":
            made.flush_cache()
            assert tier(made, "host", "blocks") == 0
        gate.set()
        result.thread.join(20)
        eventually(lambda: not made.core.ledger.loading)
        eventually(lambda: not made.stats()["tiers"]["loading"])
        made.check()
        if what in ("look", "fail"):
            same(path, prompt, result.tokens, what)
        if what == "flush":
            assert made.stats()["groups"][0]["free"] == POOL, "nothing of it is in the pool"
        assert result.cached == {"look": 256, "fail": 0, "abort": 0, "flush": 0}[what]
        assert all(group["protected"] == group["leased"] == 0 for group in made.stats()["groups"])


# --- a store belongs to one model


@pytest.mark.parametrize("other", ["weights", "tokenizer", "page_size", "dtype", "model"])
def test_a_store_of_another_model_is_set_aside(tiny_model: Tiny, tmp_path: Path, caplog: Any, other: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    prompt, kv = text(41, 300), tmp_path / "kv"
    for folder in (first, second):
        shutil.copytree(tiny_model("llama"), folder)
    if other == "weights":
        weights = bytearray((second / "model.safetensors").read_bytes())
        weights[-2] ^= 64
        (second / "model.safetensors").write_bytes(weights)
    elif other == "tokenizer":
        table = json.loads((second / "tokenizer.json").read_text())
        table["added_tokens"][0]["content"] = "<begin>"
        (second / "tokenizer.json").write_text(json.dumps(table))
    with tiered(first, kv) as made:
        run(made, prompt)
        stored(made, 4)
    with tiered(first, kv) as made:
        assert run(made, prompt)[1] == 256, "a copy of the same model is the same model"
    sections: dict[str, Any] = {"cache": {"page_size": 4}} if other == "page_size" else {}
    sections |= {"model": {"dtype": "bfloat16"}} if other == "dtype" else {}
    with tiered(tiny_model("gemma3") if other == "model" else second, kv, **sections) as made:
        assert run(made, prompt)[1] == 0
    assert "was made with another" in caplog.text
    assert "set-aside-1" in caplog.text
    assert len(list((kv / "set-aside-1").glob("blocks/*/*"))) >= 4


# --- all of it at once


def soak(path: Path, kv: Path, requests: int, write: str = "through", **sections: Any) -> dict[str, Any]:
    """Random texts of a family, salts, lengths and aborts over tiers that are too small for all of it."""
    rng = random.Random(requests)
    family = [text(seed, 330, shared=shared) for seed, shared in ((51, 0), (52, 150), (53, 150), (54, 220), (55, 0))]
    few = {"lfm2": BLOCK * 256, "mamba2": 25_000}.get(path.name, BLOCK * 1152)  # bytes of what a block has of most
    host = {"size": 14 * (few + 256), "write": write}
    with tiered(path, kv, storage=FAULTY, host=host, disk={"size": "3MiB"}, **sections) as made:
        for _ in range(requests // 5):
            calls = []
            for _ in range(5):
                prompt = rng.choice(family)[: rng.choice([40, 129, 200, 329])]
                calls.append((prompt, rng.choice([None, "a"]), rng.random() < 0.15))
            device(made).faults = {rng.choice(["write", "read", "corrupt", "touch"])} if rng.random() < 0.2 else set()
            done: list[tuple[list[int], list[int]]] = []
            threads = [threading.Thread(target=_one, args=(made, *call, done)) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(done) == sum(not leave for *_, leave in calls)
            for prompt, got in done:
                same(path, prompt, got, f"{len(prompt)} tokens")
        device(made).faults.clear()
        eventually(lambda: not made.stats()["tiers"]["loading"])
        made.flush_cache()
        assert all(group["free"] == group["total"] for group in made.stats()["groups"])
        return dict(made.stats())


def _one(made: Engine, prompt: list[int], salt: str | None, leave: bool, done: list[Any]) -> None:
    if leave:
        stream = made.stream(prompt, greedy(OUT), salt=salt)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    else:
        done.append((prompt, run(made, prompt, salt=salt)[0]))


@pytest.mark.parametrize(("arch", "write"), [("llama", "through"), ("lfm2", "back")])
def test_a_short_soak(tiny_model: Tiny, tmp_path: Path, arch: str, write: str) -> None:
    stats = soak(tiny_model(arch), tmp_path, 60, write)
    assert stats["tiers"]["loads"] > 3
    assert stats["tiers"]["host"]["evicted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "use", "page", "write"),
    [
        ("llama", "radix", 1, "through"),
        ("gemma3", "swa", 4, "back"),
        ("mistral", "swa", 16, "hot"),
        ("lfm2", "hybrid", 16, "through"),
        ("lfm2", "hybrid", 1, "hot"),
        ("mamba2", "hybrid", 4, "back"),
    ],
)
def test_a_long_soak(tiny_model: Tiny, tmp_path: Path, arch: str, use: str, page: int, write: str) -> None:
    cache = {"use": use, "page_size": page, "window_every": 4096}
    soak(tiny_model(arch), tmp_path, 600, write, cache=cache, schedule={"max_running": 4, "max_tokens_per_step": 64})
