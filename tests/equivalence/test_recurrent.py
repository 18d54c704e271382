"""Models with recurrent layers in whole engines: states through chunks, hits, drafts and retraction; equal outputs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import assert_same, engine, greedy, pairwise, prompts, serve, tiny_reference
from phloem import Engine, SamplingParams
from phloem.errors import ConfigError
from phloem.loop import EngineCore

TinyModel = Callable[[str], Path]
ARCHS = ["lfm2", "mamba2"]


def all_back(running: Engine) -> None:
    """Nothing is held, and after a flush every slot of every group is free."""
    running.check()
    stats = running.stats()
    assert all(group["protected"] == group["leased"] == 0 for group in stats["groups"]), stats["groups"]
    running.flush_cache()
    assert all(group["free"] == group["total"] for group in running.stats()["groups"])


@pytest.mark.parametrize(
    ("arch", "page", "chunk", "overlap"),
    [
        ("lfm2", 1, 2, "off"),
        ("mamba2", 1, 5, "on"),
        ("lfm2", 4, 6, "on"),
        ("mamba2", 4, 7, "off"),
        ("lfm2", 16, 11, "off"),
        ("mamba2", 16, 64, "on"),
    ],
)
def test_every_length_cold_and_warm(tiny_model: TinyModel, arch: str, page: int, chunk: int, overlap: str) -> None:
    """Prompts of all lengths around chunks and pages, cold, sent again, and as the start of a next turn.

    What is promised: a prompt is found to its last usable boundary, and a conversation to the end of its last turn.
    """
    folder, count = tiny_model(arch), 3
    lengths = range(1, 36)
    made = prompts(len(lengths), low=len(lengths), high=len(lengths), shared=0)
    texts = [text[:length] for text, length in zip(made, lengths, strict=True)]
    sections = {"schedule": {"chunk": chunk, "max_running": 8}, "engine": {"overlap": overlap}}
    with engine(folder, cache={"use": "hybrid", "page_size": page, "snapshot_every": 16}, **sections) as running:
        cold = serve(running, folder, texts, count)
        assert all(result.usage.cached_tokens == 0 for result in cold)
        for text, result in zip(texts, serve(running, folder, texts, count), strict=True):
            assert result.usage.cached_tokens == (len(text) - 1) // page * page
        turns = [[*text, *result.token_ids, 7, 8] for text, result in zip(texts, cold, strict=True)]
        for turn, result in zip(turns, serve(running, folder, turns, count), strict=True):
            assert result.usage.cached_tokens == (len(turn) - 3) // page * page
        all_back(running)


AXES = (
    ARCHS,
    ["hybrid", "chunk"],
    [1, 4, 16],
    [3, 16, 512],
    ["off", "on"],
    [None, "Right", "Wrong", "Tree"],
    [4096, 160],
)


@pytest.mark.parametrize(("arch", "cache", "page", "chunk", "overlap", "drafter", "tokens"), pairwise(*AXES))
def test_pairs(
    tiny_model: TinyModel, arch: str, cache: str, page: int, chunk: int, overlap: str, drafter: str | None, tokens: int
) -> None:
    """Company, chunks, pages, overlap and drafts on a chain, also in a pool that forces eviction and retraction."""
    folder, count = tiny_model(arch), 24
    texts = prompts(8)
    truth = [[*text, *tiny_reference(folder).greedy(text, count)[0]] for text in texts]
    with engine(
        folder,
        drafter=drafter,
        texts=truth,
        cache={"use": cache, "page_size": page, "tokens": tokens},
        schedule={"chunk": chunk},
        engine={"overlap": overlap},
    ) as running:
        for _ in ("cold", "warm"):
            serve(running, folder, texts, count)
        stats = running.stats()
        assert stats["retractions"] == 0 or tokens == 160
        if drafter == "Right":
            assert stats["accepted_tokens"] > 0.6 * stats["draft_tokens"] > 0
        if drafter == "Wrong":
            assert stats["draft_tokens"] > 100 > stats["accepted_tokens"]
        all_back(running)


@pytest.mark.parametrize(
    ("arch", "page", "overlap"), [("lfm2", 1, "on"), ("lfm2", 4, "off"), ("mamba2", 1, "off"), ("mamba2", 16, "on")]
)
def test_who_is_retracted_goes_on_from_its_state(tiny_model: TinyModel, arch: str, page: int, overlap: str) -> None:
    """In the middle of prompts and of outputs; what was computed is found again, but for the rest of a page."""
    folder, texts = tiny_model(arch), prompts(4, low=40, high=40, shared=0)
    sections = {"schedule": {"chunk": 16}, "engine": {"overlap": overlap}}
    with engine(folder, cache={"use": "hybrid", "page_size": page}, **sections) as running:
        core, admitted = running.core, running.core.ledger.admit
        found: list[tuple[int, int]] = []  # by those that were retracted: what they had computed, what they find
        had: dict[str, int] = {}

        def admit(request: Any) -> None:
            admitted(request)
            if request.id in had:
                found.append((had.pop(request.id), request.computed))

        def retract(engine_core: Any) -> None:
            for request in list(engine_core.scheduler.running):
                had[request.id] = request.computed
                engine_core.scheduler.retract(request)

        core.ledger.admit = admit
        streams = [running.stream(text, greedy(24)) for text in texts]
        written: list[list[int]] = [[] for _ in texts]
        for cut in range(6):
            written[cut % 4] += next(streams[cut % 4]).token_ids
            running.invoke(retract).result()
        for stream, own in zip(streams, written, strict=True):
            own += [token for piece in stream for token in piece.token_ids]
        for text, own in zip(texts, written, strict=True):
            assert_same(own, *tiny_reference(folder).greedy(text, 24))
        assert len(found) >= 6
        assert all(again >= computed // page * page for computed, again in found), found
        assert running.stats()["retractions"] >= 6
        all_back(running)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("page", [1, 4])
def test_a_shared_beginning_is_computed_twice_at_most(tiny_model: TinyModel, arch: str, page: int) -> None:
    """Prompts with one beginning, one after another: the second leaves a state where it parts from the first.

    Together they wait for the first, which leaves it there at once.
    """
    folder = tiny_model(arch)
    shared, *own = (text[:40] for text in prompts(6, low=40, high=40, shared=0))
    texts = [[*shared, *rest] for rest in own]
    with engine(folder, cache={"use": "hybrid", "page_size": page}) as running:
        found = [serve(running, folder, [text], 4)[0].usage.cached_tokens for text in texts]
        assert found == [0, 0, 40, 40, 40]
        running.flush_cache()
        found = [result.usage.cached_tokens for result in serve(running, folder, texts, 4)]
        assert found == [0, 40, 40, 40, 40]
        all_back(running)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "overlap"), [(1, "on"), (4, "off")])
def test_choices_share_the_prompt(tiny_model: TinyModel, arch: str, page: int, overlap: str) -> None:
    """All choices of one call go on from one state, and draw what they draw alone."""
    text = prompts(1, low=33, high=33)[0]
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=12, ignore_eos=True)
    with engine(tiny_model(arch), cache={"use": "chunk"}) as plain:
        expected = [output.token_ids for output in plain.generate(text, params).outputs]
    with engine(tiny_model(arch), cache={"use": "hybrid", "page_size": page}, engine={"overlap": overlap}) as running:
        for _ in ("cold", "warm"):
            assert [output.token_ids for output in running.generate(text, params).outputs] == expected
        assert running.stats()["prefill_tokens"] <= len(text) + 7 * page
        all_back(running)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "overlap"), [(1, "off"), (4, "on")])
def test_aborts_and_streams(tiny_model: TinyModel, arch: str, page: int, overlap: str) -> None:
    """Calls that are left at any point, with few slots: the others write the same, and nothing is lost."""
    folder, texts = tiny_model(arch), prompts(8)
    sections = {"cache": {"use": "hybrid", "page_size": page, "tokens": 320}, "engine": {"overlap": overlap}}
    with engine(folder, schedule={"chunk": 8}, **sections) as running:
        doomed = [running.stream(text, greedy(40)) for text in texts]
        for cut, stream in enumerate(doomed):
            for _ in range(cut):
                next(stream)
            stream.close()
        written = [token for piece in running.stream(texts[0], greedy(16)) for token in piece.token_ids]
        assert_same(written, *tiny_reference(folder).greedy(texts[0], 16))
        serve(running, folder, texts, 16)
        all_back(running)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("page", [1, 4])
def test_choices_are_scored_one_chain_after_another(tiny_model: TinyModel, arch: str, page: int) -> None:
    """No tree can branch here; the scores are those of each continuation alone, and of the reference."""
    folder = tiny_model(arch)
    choices = [[5, 6, 7], [5, 6], [5, 6, 8, 9], [7], [8, 5]]
    with engine(folder, cache={"use": "hybrid", "page_size": page}, schedule={"chunk": 16}) as running:
        for text in prompts(4, low=3, high=40):
            alone = [running.score(text, [choice])[0] for choice in choices]
            for mine, theirs in zip(running.score(text, choices), alone, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
            logprobs = _logprobs(folder, [*text, *choices[2]])
            expected = [float(logprobs[len(text) - 1 + i, token]) for i, token in enumerate(choices[2])]
            assert alone[2] == pytest.approx(expected, abs=1e-3)
        all_back(running)


@pytest.mark.parametrize("arch", ARCHS)
def test_few_states(tiny_model: TinyModel, arch: str) -> None:
    """With one snapshot for all, three requests at a time and long drafts: slower, and right."""
    folder, count = tiny_model(arch), 24
    texts = prompts(8)
    truth = [[*text, *tiny_reference(folder).greedy(text, count)[0]] for text in texts]
    cache = {"use": "hybrid", "snapshot_every": 4096}
    with engine(folder, drafter="Right", texts=truth, cache=cache, schedule={"max_running": 3, "chunk": 8}) as running:
        for _ in range(3):
            serve(running, folder, texts, count)
            states = running.stats()["groups"][-1]
            assert states["evictable"] == 1
        assert running.stats()["retractions"] == 0
        all_back(running)


def test_the_default_and_what_is_refused(tiny_model: TinyModel) -> None:
    """`auto` takes `hybrid`; caches that keep no states are refused by name, and too little memory with the sum."""
    with engine(tiny_model("lfm2")) as running:
        assert type(running.core.ledger.cache).__name__ == "HybridCache"
        assert "states (64 requests x 3 + 4 x 16 draft nodes + 16 kept) x 1,024 bytes" in running.core.parts.memory
    for use in ("radix", "swa"):
        with pytest.raises(ConfigError, match=rf"'{use}' keeps K and V of tokens only, and lfm2 has 2 recurrent"):
            engine(tiny_model("lfm2"), cache={"use": use})
    with pytest.raises(ConfigError, match=r"states \(64 requests x 3 .* not even one page") as caught:
        engine(tiny_model("lfm2"), cache={"tokens": None, "size": 2**16})
    assert "schedule.max_running" in str(caught.value)


@pytest.mark.parametrize(("arch", "page"), [("lfm2", 1), ("mamba2", 4)])
def test_grammars_and_text_drafters_on_a_chain(tiny_model: TinyModel, arch: str, page: int) -> None:
    """What a grammar forces and what repeats is drafted; the output is that of masked decoding without drafts."""
    folder, texts = tiny_model(arch), [text * 2 for text in prompts(3, high=20)]
    pattern = r"(the|a) (quick|slow) (fox|dog)s?( and so on)?\."
    params = [SamplingParams(temperature=0.0, max_tokens=40, regex=pattern), greedy(30)]
    grammar = {"use": "phloem.testing.toy_grammar:ToyGrammar"}
    with engine(folder, grammar=grammar, spec=[], cache={"use": "chunk"}) as plain:
        expected = [[result.token_ids for result in plain.generate(texts, each)] for each in params]
    spec = [{"use": "grammar"}, {"use": "ngram"}]
    with engine(folder, grammar=grammar, spec=spec, cache={"use": "hybrid", "page_size": page}) as running:
        for _ in ("cold", "warm"):
            got = [[result.token_ids for result in running.generate(texts, each)] for each in params]
            assert got == expected
        assert running.stats()["accepted_tokens"] > 0
        all_back(running)


@pytest.mark.parametrize(("arch", "drafter"), [("lfm2", "Right"), ("mamba2", None)])
def test_logprobs_of_prompts_and_outputs(tiny_model: TinyModel, arch: str, drafter: str | None) -> None:
    """Warm too, when a prompt whose log-probabilities are owed is run from its start."""
    folder, text = tiny_model(arch), prompts(1, low=30, high=30)[0]
    truth = [*text, *tiny_reference(folder).greedy(text, 12)[0]]
    logprobs = _logprobs(folder, truth)
    with engine(folder, drafter=drafter, texts=[truth], cache={"use": "hybrid"}, schedule={"chunk": 8}) as running:
        for _ in ("cold", "warm"):
            result = running.generate(text, greedy(12, logprobs=0, prompt_logprobs=0))
            got = [*(result.prompt_logprobs or [])[1:], *(result.logprobs or [])]
            assert [entry.token_id for entry in got] == truth[1:]
            for at, entry in enumerate(got):
                assert entry.logprob == pytest.approx(float(logprobs[at, truth[at + 1]]), abs=1e-3)
        all_back(running)


@torch.inference_mode()
def _logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """The reference's, [len(tokens), vocab]."""
    logits: torch.Tensor = tiny_reference(folder).model(torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(-1)


def test_nothing_is_marked_at_who_was_preempted_in_the_same_step(tiny_model: TinyModel) -> None:
    """One waits for a prefix of a request that has just given way: it had no states any more, and was given some."""
    long, other = prompts(2, low=400, high=420, shared=0)
    sections = {"schedule": {"use": "priority", "max_running": 1, "chunk": 4}}
    with engine(tiny_model("lfm2"), **sections) as running:
        first = running.stream(long, greedy(2))
        late = [
            running._call(other, greedy(2), stream=False, priority=100),
            running._call([*long[:200], 7], greedy(2), stream=False),
        ]
        done: queue.SimpleQueue[str] = queue.SimpleQueue()

        def arrive(core: EngineCore) -> None:
            for call in late:
                running.open_call(call, lambda event: done.put(event.call_id) if event.finish_reason else None)

        def read() -> None:
            list(first)
            done.put("first")

        threading.Thread(target=read).start()
        while not running.stats()["running"]:
            time.sleep(0.001)
        running.invoke(arrive).result()
        assert {done.get(timeout=60) for _ in range(3)} == {"first", *(call.call_id for call in late)}
        assert running.stats()["retractions"] > 0
        running.check()
