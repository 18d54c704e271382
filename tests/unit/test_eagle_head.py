"""EAGLE heads at work in an engine, held to one written from the paper: the same weights, the same logits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle1_reference import ReferenceEagle1
from eagle_heads import config_of, make_head, read_head, tensors_of, write_head
from eagle_reference import Past, ReferenceEagle3
from equivalence.harness import TOYS, engine, greedy, prompts, tiny_reference
from equivalence.test_soak import traffic

from phloem import Engine
from phloem.plugins.spec._eagle_choice import Choice

Tiny = Callable[[str], Path]


@dataclass
class Spied:
    """What a head was asked in an engine: the text, the drafted path behind it, and its logits."""

    asked: list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]] = field(default_factory=list)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    found, whole = Spied(), Choice.chances

    def chances(self: Choice, contexts: Sequence[Any], paths: Sequence[Sequence[int]], logits: torch.Tensor) -> Any:
        rows = zip(contexts, paths, logits.clone(), strict=True)
        found.asked += [(tuple(each.tokens), tuple(path), row) for each, path, row in rows]
        return whole(self, contexts, paths, logits)

    monkeypatch.setattr(Choice, "chances", chances)
    return found


def features_of(running: Engine, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """[T, layers * hidden] of a text by the engine's own model, in one pass over slots nobody uses."""
    from phloem.testing.attention import NaiveAttention
    from phloem.testing.ragged import Part, Ragged

    model = running.core.parts.executor.model
    ragged = Ragged(model.spec, slots=2048)
    batch = ragged.step([Part(0, list(tokens))])
    _, states = model.forward_seen(batch, NaiveAttention().prepare(batch, ragged.kv), layers)
    return states.flatten(1)


def compare(running: Engine, head: Path, spied: Spied, most: int = 60) -> None:
    """The first and last of all that was asked, against the reference."""
    config, tensors = read_head(head)
    model = running.core.parts.executor.model
    embed = model.embed(torch.arange(model.spec.vocab_size))
    reference = ReferenceEagle3(config, tensors, embed)

    @functools.cache
    def start(text: tuple[int, ...]) -> Past:
        return reference.start(torch.tensor(text), features_of(running, text, config["layers"]))

    @functools.cache
    def walk(text: tuple[int, ...], path: tuple[int, ...]) -> Past:
        return reference.step(walk(text, path[:-1]), path[-1]) if path else start(text)

    assert spied.asked
    picked = spied.asked if len(spied.asked) <= most else [*spied.asked[: most // 2], *spied.asked[-most // 2 :]]
    for text, path, row in picked:
        torch.testing.assert_close(row, walk(text, path).logits, atol=1e-4, rtol=1e-4)


# architecture, cache, page size, chunk, breadth, requests, overlap, pool
ROWS = [
    ("llama", "radix", 1, 512, 1, 1, "off", 4096),
    ("llama", "radix", 1, 5, 3, 4, "off", 4096),
    ("llama", "radix", 4, 512, 3, 4, "on", 4096),
    ("llama", "radix", 1, 16, 2, 6, "off", 200),
    ("llama", "chunk", 4, 7, 2, 3, "off", 4096),
    ("gemma3", "swa", 4, 512, 2, 3, "off", 4096),
    ("lfm2", "hybrid", 4, 16, 2, 3, "off", 4096),
    ("mamba2", "hybrid", 1, 512, 1, 2, "off", 4096),
]


@pytest.mark.parametrize("row", ROWS)
def test_logits_are_the_reference_s(tiny_model: Tiny, tmp_path: Path, spied: Spied, row: tuple[Any, ...]) -> None:
    """Cold, then with the prefix cached; chains and trees; chunked prompts; several requests; after retraction."""
    arch, cache, page, chunk, breadth, requests, overlap, pool = row
    folder, count = tiny_model(arch), 6 if pool == 4096 else 30
    head = make_head(tmp_path / "head", folder)
    spec = [{"use": "eagle3", "model": str(head), "breadth": breadth, "max_tokens": 3}]
    sections: dict[str, Any] = {
        "cache": {"use": cache, "page_size": page, "tokens": pool},
        "schedule": {"chunk": chunk},
    }
    with engine(folder, spec=spec, engine={"overlap": overlap}, **sections) as running:
        asked = prompts(requests, low=8, high=30)
        for _ in range(2):
            results = running.generate(asked, greedy(count))
            compare(running, head, spied)
            spied.asked.clear()
        assert (max(result.usage.cached_tokens for result in results) > 0) == (cache != "chunk")
        stats = running.stats()
        assert stats["drafter_failures"] == {}
        assert stats["draft_tokens"] > 0
        assert (stats["retractions"] > 0) == (pool < 4096)


@pytest.mark.parametrize("page", [1, 4])
def test_accepted_drafts_leave_the_target_s_entries(tiny_model: Tiny, tmp_path: Path, spied: Spied, page: int) -> None:
    """Whoever drafted them, on whatever branch: their features are the target's, and follow them when they move."""
    folder, asked = tiny_model("llama"), prompts(2, low=8, high=30)
    texts = [[*prompt, *tiny_reference(folder).greedy(prompt, 16)[0]] for prompt in asked]
    head = make_head(tmp_path / "head", folder)
    right = {"use": f"{TOYS}:Tree", "texts": texts, "length": 3}
    spec = [right, {"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 2}]
    with engine(folder, spec=spec, cache={"page_size": page}) as running:
        running.generate(asked, greedy(16))
        stats = running.stats()
        assert stats["accepted_tokens"] >= 16
        assert (stats["moved_kv_bytes"] > 0) == (page > 1)
        compare(running, head, spied)


@pytest.mark.parametrize("changes", [{"norm_before_residual": True}, {"layers": [0, 3], "head_dim": 24}])
def test_variants(tiny_model: Tiny, tmp_path: Path, spied: Spied, changes: dict[str, Any]) -> None:
    """The residual of `speculators`; other layers; wider heads; an embedding of its own; biases."""
    folder = tiny_model("llama")
    config = config_of(folder, **changes)
    tensors = tensors_of(config)
    random = torch.Generator().manual_seed(1)
    tensors["embed_tokens.weight"] = torch.randn(
        config["target"]["vocab_size"], config["hidden_size"], generator=random
    )
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = tensors[f"midlayer.self_attn.{name}.weight"].shape[0]
        tensors[f"midlayer.self_attn.{name}.bias"] = torch.randn(rows, generator=random)
    head = write_head(tmp_path / "head", config, tensors)
    with engine(folder, spec=[{"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 3}]) as running:
        running.generate(prompts(2), greedy(6))
        compare(running, head, spied)


@pytest.mark.parametrize("normed", [False, True])
def test_the_first_eagle(tiny_model: Tiny, tmp_path: Path, spied: Spied, normed: bool) -> None:
    """Cold and cached: the target's last states, its own head, and no norm before attention unless one is there."""
    folder = tiny_model("llama")
    config = config_of(folder, algorithm="eagle")
    tensors = tensors_of(config, spread=0.05)  # logits of a size at which 1e-4 means something
    if normed:
        tensors["midlayer.input_layernorm.weight"] = torch.linspace(0.5, 1.5, config["hidden_size"])
    head = write_head(tmp_path / "head", config, tensors)
    with engine(folder, spec=[{"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 3}]) as running:
        model = running.core.parts.executor.model
        embed, unembed = model.embed(torch.arange(512)), model.logits(torch.eye(config["hidden_size"])).T
        reference = ReferenceEagle1(config, tensors, embed, unembed)
        for _ in range(2):
            running.generate(prompts(2, low=8, high=20), greedy(6))
            for text, path, row in [*spied.asked[:8], *spied.asked[-8:]]:
                states = features_of(running, text, [3])
                torch.testing.assert_close(row, reference.logits([*text], states, [*path]), atol=1e-4, rtol=1e-4)
            spied.asked.clear()


def test_a_leader_s_chain_is_followed(tiny_model: Tiny, tmp_path: Path, spied: Spied) -> None:
    """What stands behind the text is drafted, not the text: its entries are made as drafted ones are."""
    from array import array

    from phloem.interfaces import DraftContext
    from phloem.params import SamplingParams
    from phloem.request import Namespace

    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder)
    with engine(folder, spec=[{"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 2}]) as running:
        [result] = running.generate(prompts(1, low=20), greedy(2))
        drafting = running.core.parts.drafting
        text = [*prompts(1, low=20)[0], *result.token_ids]
        spied.asked.clear()
        cache = running.core.ledger.cache
        lease = cache.lease(cache.match(array("i", text), len(text) - 1, Namespace()))
        context = DraftContext("x", array("i", [*text, 9, 8]), 20, Namespace(), None, SamplingParams(), chain=2)
        context.slots = cache.slots(lease)[0]
        [draft] = drafting.drafters[0][1].propose_all([context], [8])
        cache.release(lease)
        assert draft is not None
        assert {tokens[-2:] for tokens, _, _ in spied.asked} == {(9, 8)}
        config, tensors = read_head(head)
        embed = running.core.parts.executor.model.embed(torch.arange(512))
        reference = ReferenceEagle3(config, tensors, embed)
        past = reference.start(torch.tensor(text), features_of(running, text, config["layers"]))
        past = reference.step(reference.step(past, 9), 8)
        torch.testing.assert_close(spied.asked[0][2], past.logits, atol=1e-4, rtol=1e-4)


def test_the_tree_is_the_likeliest_one(tiny_model: Tiny, tmp_path: Path, spied: Spied) -> None:
    """EAGLE-2's: of all that was found the best by the product of chances, parents before their children."""
    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder)
    spec = [{"use": "eagle", "model": str(head), "breadth": 3, "max_tokens": 3}]
    with engine(folder, spec=spec, engine={"draft_tokens": 7}) as running:
        drafter: Any = running.core.parts.drafting.drafters[0][1]
        drafts = []
        whole = drafter.propose_all
        drafter.propose_all = lambda contexts, budgets: drafts.append(whole(contexts, budgets)) or drafts[-1]
        running.generate(prompts(1, low=20), greedy(12))
        draft = next(draft for [draft] in drafts if draft is not None)
    chances = {path: row.softmax(0) for _, path, row in spied.asked[:7]}
    ids = drafter._choice._ids.tolist()
    found: dict[tuple[int, ...], float] = {}
    for path in sorted(chances, key=len):
        for chance, place in zip(*(each.tolist() for each in chances[path].topk(3)), strict=True):
            found[(*path, ids[place])] = chance * (found[path] if path else 1.0)
    assert len(found) == 3 * 7
    best = sorted(found, key=lambda path: -found[path])[:7]
    paths = [tuple(draft.tokens[node] for node in draft.path(i)) for i in range(len(draft))]
    assert set(paths) == set(best)
    assert draft.confidence is not None
    for path, chance in zip(paths, draft.confidence, strict=True):
        assert chance == pytest.approx(found[path] / (found[path[:-1]] if path[:-1] else 1.0), rel=1e-4)
    assert draft.likeliest() == list(range(len(draft.likeliest())))


def test_rows_come_back_from_host_memory_and_disk(tiny_model: Tiny, tmp_path: Path, spied: Spied) -> None:
    """With the K and V of their tokens: what the head makes of a prefix that was evicted is what it was."""
    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder)
    spec = [{"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 2}]
    disk = {"use": "file", "path": str(tmp_path / "kv"), "size": "64MiB"}
    cache = {"tokens": 512, "host": {"size": "16MiB"}, "disk": disk}
    asked, crowd = prompts(1, low=200, high=200), prompts(4, low=250, high=250, seed=9)
    with engine(folder, spec=spec, cache=cache) as running:
        running.generate(asked, greedy(2))
        running.generate(crowd, greedy(2))
        spied.asked.clear()
        [result] = running.generate(asked, greedy(4))
        assert result.usage.cached_tokens >= 128
        compare(running, head, spied, 4)
        running.check()
    spied.asked.clear()
    with engine(folder, spec=spec, cache=cache) as running:
        [result] = running.generate(asked, greedy(4))
        assert result.usage.cached_tokens >= 128
        compare(running, head, spied, 4)


def test_stored_rows_of_another_head_are_not_used(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    cache = {"tokens": 512, "disk": {"use": "file", "path": str(tmp_path / "kv"), "size": "64MiB"}}
    asked, found = prompts(1, low=200, high=200), []
    for name in ("one", "one", "two"):
        head = make_head(tmp_path / name, folder, seed=len(name) + ord(name[0]))
        with engine(folder, spec=[{"use": "eagle", "model": str(head)}], cache=cache) as running:
            [result] = running.generate(asked, greedy(2))
            found.append(result.usage.cached_tokens)
    assert found[0] == found[2] == 0 < found[1]


def test_the_memory_plan_counts_rows(tiny_model: Tiny, tmp_path: Path) -> None:
    """One more layer of K and V, a feature, and what is drafted: 64 requests of 9 + 4 * 4 + 1 rows."""
    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder)
    with engine(folder, spec=[{"use": "eagle", "model": str(head)}], cache={"tokens": 512}) as running:
        each = 3 * 2 * 2 * 16 * 4 + 2 * 2 * 16 * 4 + 64 * 4
        assert f"512 tokens x {each:,} bytes" in running.core.parts.memory
        assert (
            f"{64 * (9 + 16):,} rows x {2 * 2 * 16 * 4 + 64 * 4:,} bytes for drafts of spec.eagle"
            in running.core.parts.memory
        )


@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_rows_are_right_after_much_traffic(
    tiny_model: Tiny, tmp_path: Path, spied: Spied, page: int, overlap: str
) -> None:
    """Evictions, preemption, aborts, choices, salts, a host tier: what is found in the cache is what was computed."""
    folder = tiny_model("llama")
    head = make_head(tmp_path / "head", folder)
    with engine(
        folder,
        spec=[{"use": "eagle", "model": str(head), "breadth": 2, "max_tokens": 3}],
        cache={"tokens": 240, "page_size": page, "host": {"size": "1MiB"}},
        schedule={"use": "priority", "chunk": 16, "max_running": 8},
        engine={"overlap": overlap},
    ) as running:
        clients = [threading.Thread(target=traffic, args=(running, seed, 12)) for seed in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        stats = running.stats()
        assert stats["evicted_tokens"] > 0
        assert stats["drafter_failures"] == {}
        spied.asked.clear()
        cached = 0
        for prompt in prompts(12, seed=3):
            cached += running.generate(prompt, greedy(4)).usage.cached_tokens
            compare(running, head, spied, 4)
            spied.asked.clear()
        assert cached > 60
        running.check()
