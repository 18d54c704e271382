"""Tiers below caches that do not keep every token: states of recurrent layers, and windows that the pool lets go of.

What is promised, beside the tokens of the plain engine: a text comes back to its last whole block, before the last
token of a prompt and at the end of an answer; a beginning that prompts share, from the third on.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem import Engine
from phloem.request import Namespace
from phloem.tier_blocks import Layout, state_name

from .harness import greedy
from .tier_rig import (
    BLOCK,
    FAULTY,
    POOL,
    Loading,
    crowd,
    device,
    eventually,
    run,
    same,
    text,
    tier,
    tiered,
    whole,
)

ROOT = Path(__file__).parents[2]
Tiny = Callable[[str], Path]
RECURRENT = ["lfm2", "mamba2"]


def empty(made: Engine) -> None:
    """Evict all that nobody uses, so that who writes back does."""
    for group in range(len(made.stats()["groups"])):
        made.invoke(lambda core, group=group: core.ledger.cache.evict(10**6, group)).result()


def names(made: Engine, prompt: list[int]) -> list[bytes]:
    """Of a text's blocks."""
    below: Any = made.core.ledger.tiers
    return list(below._chain([], array("i", prompt), Namespace()))


# --- what comes back


@pytest.mark.parametrize(("arch", "write", "page"), [("lfm2", "back", 1), ("mamba2", "through", 16)])
def test_a_conversation_comes_back_to_its_last_block(tiny_model: Tiny, arch: str, write: str, page: int) -> None:
    """At the end of an answer, wherever steps and blocks end, and before the last token of its prompt."""
    path = tiny_model(arch)
    sections: Any = {"cache": {"use": "hybrid", "page_size": page}, "schedule": {"chunk": 48}}
    with tiered(path, host={"size": "64MiB", "write": write}, **sections) as made:
        for seed, length, answer in ((1, 150, 80), (2, 60, 10), (3, 128, 66), (4, 70, 130)):
            prompt = text(seed, length)
            whole_text = [*prompt, *made.generate(prompt, greedy(answer)).token_ids]
            for turn in ([*whole_text, 5, 6], prompt):
                empty(made)
                got, cached = run(made, turn)
                same(path, turn, got, f"{len(turn)} tokens")
                computed = len(whole_text) - 1 if turn is not prompt else length - 1
                assert cached >= computed // BLOCK * BLOCK


@pytest.mark.parametrize(("arch", "page"), [("lfm2", 16), ("mamba2", 1)])
def test_a_shared_beginning_comes_back_from_the_third_prompt_on(tiny_model: Tiny, arch: str, page: int) -> None:
    """The second knows from the tiers where it parts from the first, and leaves a state there."""
    path = tiny_model(arch)
    with tiered(path, cache={"page_size": page}) as made:
        found = []
        for seed in range(4):
            got, cached = run(made, prompt := text(seed, 290, shared=200))
            same(path, prompt, got, f"prompt {seed}")
            found.append(cached)
            empty(made)
        assert found == [0, 0, 192, 192]


@pytest.mark.parametrize("arch", RECURRENT)
def test_texts_shorter_than_a_block_stay_in_the_pool(tiny_model: Tiny, arch: str) -> None:
    """Snapshots are closer to each other than blocks are long."""
    path, prompt = tiny_model(arch), text(5, 40)
    with tiered(path) as made:
        for expected in (0, 39):
            got, cached = run(made, prompt)
            same(path, prompt, got, "short")
            assert cached == expected
        assert tier(made, "host", "blocks") == 0


@pytest.mark.parametrize("arch", RECURRENT)
def test_a_block_of_large_pages(tiny_model: Tiny, arch: str) -> None:
    """Of 96 tokens: longer than most of what is between two states."""
    path, prompt = tiny_model(arch), text(6, 400)
    with tiered(path, cache={"page_size": 96, "tokens": 960}) as made:
        run(made, prompt)
        empty(made)
        got, cached = run(made, prompt)
        same(path, prompt, got, "loaded")
        assert cached == 384


@pytest.mark.parametrize("arch", RECURRENT)
def test_few_snapshots(tiny_model: Tiny, arch: str) -> None:
    """The pool may keep one: what makes way for the next comes from the tier, and what comes makes others go."""
    path, prompts = tiny_model(arch), [text(7, 300), text(8, 290, shared=200)]
    sections: Any = {"cache": {"snapshot_every": 4096}, "schedule": {"max_running": 2, "chunk": 32}}
    with tiered(path, host={"size": "64MiB", "write": "back"}, **sections) as made:
        for _ in range(2):
            for prompt in prompts:
                got, cached = run(made, prompt)
                same(path, prompt, got, "few")
        assert cached >= 256
        assert made.stats()["retractions"] == 0
        assert made.stats()["tiers"]["loads"] > 0


def test_states_count_as_what_they_are(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the budget, as entries of their own; and each is copied once."""
    path, prompt = tiny_model("mamba2"), text(9, 300)
    with tiered(path, cache={"snapshot_every": 16}) as made:
        run(made, prompt)
        state = sum(each.floats for each in made.core.info.spec.states) * 4
        told = made.stats()["tiers"]["host"]
        assert told["blocks"] == 4 + 1
        assert told["bytes"] == state + 5 * 256
        monkeypatch.setattr(Layout, "copy_state", None)
        run(made, [*prompt, 7])
        assert tier(made, "host", "failures") == 0


def test_a_state_in_use_stays_in_memory(tiny_model: Tiny) -> None:
    """With the blocks before it: here three of four have a place."""
    path, prompts = tiny_model("mamba2"), [text(seed, 200) for seed in (21, 22, 23, 24)]
    state = BLOCK * 500  # a little more than it takes
    with tiered(path, host=3 * (state + 3 * 600), cache={"tokens": 2048, "snapshot_every": 16}) as made:
        for number in (0, 1, 0, 2, 3):
            run(made, prompts[number])
        assert tier(made, "host", "evicted") > 0
        empty(made)
        assert [run(made, prompts[number])[1] for number in (0, 1)] == [192, 0]


@pytest.mark.parametrize(("arch", "spec"), [("lfm2", "ngram"), ("mamba2", "draft")])
def test_drafts_behind_what_was_loaded(tiny_model: Tiny, arch: str, spec: str) -> None:
    """Chains whose states are verified from one that came back; the answer's blocks end between accepted nodes."""
    path, prompt = tiny_model(arch), [*text(10, 100), *text(10, 100)]
    more = {"model": str(tiny_model("llama"))} if spec == "draft" else {"min_match": 1}
    with tiered(path, spec=[{"use": spec, **more}]) as made:
        answer = made.generate(prompt, greedy(60)).token_ids
        for turn, least in ((prompt, 192), ([*prompt, *answer, 9], 256)):
            empty(made)
            got, cached = run(made, turn)
            same(path, turn, got, "loaded")
            assert cached >= least
        assert made.stats()["draft_tokens"] > 0


# --- failures


@pytest.mark.parametrize("fault", ["write", "read", "torn", "corrupt", "empty"])
def test_a_device_that_fails_costs_a_computation(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("phloem.tier_shelf._REST_S", 0.0)
    path, prompt = tiny_model("lfm2"), text(31, 300)
    with tiered(path, tmp_path, storage=FAULTY, host=None, disk={"faults": (fault,)}) as made:
        for expected in (0, 0):
            got, cached = run(made, prompt)
            same(path, prompt, got, fault)
            assert cached == expected
            crowd(made)
            eventually(lambda: not tier(made, "disk", "backlog"))
        device(made).faults.clear()
        for _ in range(2):
            crowd(made)
            eventually(lambda: not tier(made, "disk", "backlog"))
            got, cached = run(made, prompt)
            same(path, prompt, got, "mended")
        assert cached == 256


@pytest.mark.parametrize("arch", RECURRENT)
@pytest.mark.parametrize("gone", ["absent", "corrupt", "another's"])
def test_a_state_that_is_not_to_be_had(tiny_model: Tiny, tmp_path: Path, arch: str, gone: str) -> None:
    """A load ends at the one before, or does not begin."""
    path, first, second = tiny_model(arch), text(41, 290, shared=200), text(42, 290, shared=200)
    with tiered(path, tmp_path, host=None) as made:
        for prompt in (first, second):
            run(made, prompt)
            empty(made)
        eventually(lambda: not tier(made, "disk", "backlog"))
        own, last = names(made, second), state_name(names(made, second)[3])
        file = device(made)._file(last.hex())
        assert device(made).holds(last)
        if gone == "absent":
            device(made).reject(last)
        elif gone == "corrupt":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        else:
            file.write_bytes(device(made)._file(own[3].hex()).read_bytes())
        got, cached = run(made, second)
        same(path, second, got, gone)
        assert cached == 192, "the second left a state where it parts from the first"
        assert made.stats()["tiers"]["failed"] == 0


@pytest.mark.parametrize("what", ["abort", "fail", "flush"])
def test_what_happens_while_a_state_is_being_filled(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its slot is accounted for, and comes back."""
    path, prompt = tiny_model("lfm2"), text(38, 300)
    with tiered(path) as made:
        run(made, prompt)
        empty(made)
        below: Any = made.core.ledger.tiers
        gate, fill = threading.Event(), below.loads._fill

        def wait(ticket: Any) -> None:
            gate.wait(20)
            if what == "fail":
                raise RuntimeError("the copy failed, as the test asked for")
            fill(ticket)

        monkeypatch.setattr(below.loads, "_fill", wait)
        result = Loading(made, prompt)
        run(made, text(39, 60))
        made.check()
        assert [group["leased"] for group in made.stats()["groups"]] == [256, 1]
        if what in ("abort", "flush"):
            made.invoke(lambda core: core.abort_now(result.call_id)).result()
        if what == "flush":
            made.flush_cache()
        gate.set()
        result.thread.join(20)
        eventually(lambda: not made.core.ledger.loading)
        eventually(lambda: not made.stats()["tiers"]["loading"])
        made.check()
        if what == "fail":
            same(path, prompt, result.tokens, what)
        if what == "flush":
            assert all(group["free"] == group["total"] for group in made.stats()["groups"])
        assert all(group["protected"] == group["leased"] == 0 for group in made.stats()["groups"])


def test_a_retracted_request_goes_on_from_a_state_that_was_loaded(tiny_model: Tiny) -> None:
    path, prompt = tiny_model("lfm2"), text(37, 300)
    with tiered(path) as made:
        run(made, prompt)
        empty(made)
        stream = made.stream(prompt, greedy(120))
        tokens = list(next(stream).token_ids)
        made.invoke(lambda core: core.scheduler.retract(core.scheduler.running[0])).result()
        empty(made)
        tokens += [token for delta in stream for token in delta.token_ids]
        same(path, prompt, tokens[:6], "after a retraction")
        assert made.stats()["retractions"] == 1
        assert made.stats()["tiers"]["loads"] >= 1


# --- windows

SCARCE: dict[str, Any] = {"cache": {"use": "swa", "window_every": 4096}, "schedule": {"max_running": 1, "chunk": 16}}


@pytest.mark.parametrize(("arch", "page"), [("gemma3", 1), ("mistral", 4)])
def test_windows_are_written_back_before_they_go(tiny_model: Tiny, arch: str, page: int) -> None:
    """From the middle of a long prompt as well, where several texts part within a block."""
    path = tiny_model(arch)
    sections = {**SCARCE, "cache": {**SCARCE["cache"], "page_size": page}}
    sections["schedule"] = {**sections["schedule"], "max_tokens_per_step": 16}
    prompts = [text(1, 300), text(2, 290, shared=200), text(3, 257, shared=200)]
    with tiered(path, host={"size": "64MiB", "write": "back"}, **sections) as made:
        for prompt in prompts:
            same(path, prompt, run(made, prompt)[0], "cold")
        crowd(made)
        for prompt in prompts:
            for part in (prompt, prompt[:140]):
                got, cached = run(made, part)
                same(path, part, got, "written back")
                assert cached >= whole(part)
        assert made.stats()["tiers"]["failed"] == 0


def test_windows_of_what_is_hot(tiny_model: Tiny) -> None:
    """The end of a prompt stays whole in the pool until it is found again."""
    path, prompt, once = tiny_model("gemma3"), text(4, 300), text(5, 300)
    sections = {**SCARCE, "schedule": {**SCARCE["schedule"], "max_tokens_per_step": 16}}
    sections["cache"] = {"use": "swa", "window_every": 128, "tokens": 2 * POOL}
    with tiered(path, host={"size": "64MiB", "write": "hot"}, **sections) as made:
        run(made, prompt)
        run(made, once)
        got, cached = run(made, prompt)
        same(path, prompt, got, "in the pool")
        assert cached == 299
        crowd(made)
        crowd(made)
        got, cached = run(made, prompt)
        same(path, prompt, got, "hot")
        assert cached == 256
        assert run(made, once)[1] == 0


# --- beside what keeps prefixes in the pool


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_holds_and_pins(tiny_model: Tiny, arch: str, write: str) -> None:
    """What was loaded can be held and pinned, stays then, and comes back once more when it was let go."""
    path, prompt, pinned = tiny_model(arch), text(51, 195), text(52, 2 * BLOCK)
    cache = {"tokens": 2 * POOL, "pin_share": 0.25, "snapshot_every": 64}
    schedule = {"max_running": 4, "hold_share": 0.5}
    with tiered(path, host={"size": "64MiB", "write": write}, cache=cache, schedule=schedule) as made:
        first = made.generate(prompt, greedy(5)).token_ids
        made.generate([*pinned, 7], greedy(2))
        empty(made)
        turn = [*prompt, *first, 5]
        held = made.generate(turn, greedy(4), hold="talk")
        assert held.usage.cached_tokens >= 192
        made.pin("system", pinned)
        empty(made)
        loads = made.stats()["tiers"]["loads"]
        third = [*turn, *held.token_ids, 8]
        assert run(made, third)[1] >= len(third) - 2, "it is held"
        got, cached = run(made, [*pinned, 9])
        same(path, [*pinned, 9], got, "pinned")
        assert cached == len(pinned)
        assert made.stats()["tiers"]["loads"] == loads
        made.invoke(lambda core: core.drop_hold("talk")).result()
        made.unpin("system")
        empty(made)
        made.check()
        assert all(group["protected"] == 0 for group in made.stats()["groups"])
        for again in (third, [*pinned, 9]):
            got, cached = run(made, again)
            same(path, again, got, "let go")
            assert cached >= whole(again)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("fault", [None, "read", "corrupt"])
def test_pins_of_the_configuration(tiny_model: Tiny, tmp_path: Path, arch: str, fault: str | None) -> None:
    """After a restart they come from the disk, or are computed where it fails; they stay whatever else comes."""
    path, pinned = tiny_model(arch), text(53, 2 * BLOCK + 9)
    pins = [{"name": "system", "token_ids": pinned}, {"name": "own", "token_ids": pinned[:BLOCK], "salt": "a"}]
    cache = {"tokens": 2 * POOL, "pin_share": 0.25, "snapshot_every": 64, "pins": pins}
    for life in range(2):
        faults = {"faults": (fault,)} if life and fault else {}
        with tiered(path, tmp_path, storage=FAULTY, host=None, cache=cache, disk=faults) as made:
            told = made.stats()
            assert told["pins"]["named"] == {"system": len(pinned), "own": BLOCK}
            computed = told["prefill_tokens"]
            assert computed == len(pinned) + BLOCK if not life or fault else computed <= 9 + BLOCK
            empty(made)
            for turn, salt, least in (([*pinned, 9], None, len(pinned)), ([*pinned[:BLOCK], 9], "a", BLOCK)):
                got, cached = run(made, turn, salt=salt)
                same(path, turn, got, f"life {life}")
                assert cached == least
            made.flush_cache()
            assert run(made, [*pinned, 8])[1] == len(pinned)
            eventually(lambda: not tier(made, "disk", "backlog"))


@pytest.mark.parametrize(("arch", "spec"), [("llama", "suffix"), ("lfm2", "ngram")])
def test_drafters_under_a_key_scheme(tiny_model: Tiny, arch: str, spec: str) -> None:
    """Blocks are found by keys, and what is drafted behind them is of the request's own text."""
    path, prompt = tiny_model(arch), [*text(12, 150), 3, *text(13, 100)]
    scheme = ROOT / "examples" / "plugins" / "phloem-private-tail" / "phloem_private_tail.py"
    sections: Any = {
        "cache": {"key": {"use": f"{scheme}:PrivateTail", "marker": "<|im_end|>"}},
        "spec": [{"use": spec, "min_match": 1}],
    }
    with tiered(path, **sections) as made:
        for key, expected in (("x", 0), ("y", 128), ("x", 192)):
            got, found = run(made, prompt, routing_key=key)
            same(path, prompt, got, f"client {key}")
            assert found >= (expected if arch == "llama" or key == "x" else 0)
            empty(made)
        assert made.stats()["tiers"]["loads"] > 0
        assert made.stats()["draft_tokens"] > 0
