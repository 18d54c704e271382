"""The cache `swa` in whole engines: what it keeps, what goes back while a request runs, and equal outputs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import WINDOW

from equivalence.harness import engine, greedy, pairwise, prompts, serve, tiny_reference
from phloem import Engine
from phloem.errors import ConfigError
from phloem.request import Namespace

# A pool for windows with room for three running requests and hardly anything else, beside 4,096 full slots.
SCARCE: dict[str, Any] = {
    "cache": {"use": "swa", "tokens": 4096, "window_every": 4096},
    "schedule": {"max_running": 3, "max_tokens_per_step": 32, "chunk": 16},
}


def scarce(page: int = 1, **more: Any) -> dict[str, Any]:
    """`SCARCE` at a page size, and other sections."""
    return {**SCARCE, "cache": {**SCARCE["cache"], "page_size": page}, **more}


def window_group(running: Engine) -> dict[str, int]:
    """Counts of the pool with a window."""
    group: dict[str, int] = running.stats()["groups"][-1]
    return group


@pytest.mark.parametrize(
    ("arch", "page"),
    [
        *(("gemma3", 1), ("mistral", 4), ("gemma3", 16), ("mistral", 64)),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("mistral", 1), ("gemma3", 4), ("mistral", 16), ("gemma3", 64))
        ),
    ],
)
def test_every_offset_of_window_and_chunk(tiny_model: Callable[[str], Path], arch: str, page: int) -> None:
    """Prompts of all lengths to twice the window and a chunk more; cold and warm write the same.

    Everything is kept here: a warm prompt is found but for its last token, and a conversation to its last turn's end.
    """
    folder, chunk, count = tiny_model(arch), 12, 3
    lengths = range(1, 2 * WINDOW + chunk + 2)
    made = prompts(len(lengths), low=len(lengths), high=len(lengths), shared=0)
    texts = [text[:length] for text, length in zip(made, lengths, strict=True)]
    with engine(folder, cache={"use": "swa", "page_size": page}, schedule={"chunk": chunk}) as running:
        cold = serve(running, folder, texts, count)
        for text, result in zip(texts, serve(running, folder, texts, count), strict=True):
            assert result.usage.cached_tokens == (len(text) - 1) // page * page
        turns = [[*text, *result.token_ids, 7, 8] for text, result in zip(texts, cold, strict=True)]
        for turn, result in zip(turns, serve(running, folder, turns, count), strict=True):
            assert result.usage.cached_tokens == (len(turn) - 3) // page * page
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])


@pytest.mark.parametrize(
    ("arch", "page", "overlap"),
    [
        *(
            ("gemma3", 1, "on"),
            ("mistral", 1, "off"),
            ("gemma3", 4, "off"),
            ("mistral", 16, "on"),
            ("gemma3", 64, "off"),
        ),
    ],
)
def test_a_long_output_keeps_one_window(tiny_model: Callable[[str], Path], arch: str, page: int, overlap: str) -> None:
    """While 200 tokens are written a window's slots stay in use; then the text is found to its end, and before it.

    What lies between the prompt and the last window is found no more, and computing it again heals it.
    """
    folder, count = tiny_model(arch), 200
    text = prompts(1, low=40, high=40)[0]
    output = tiny_reference(folder).greedy(text, count)[0]
    most = 0
    with engine(folder, engine={"overlap": overlap}, cache={"use": "swa", "page_size": page}) as running:
        written: list[int] = []
        for piece in running.stream(text, greedy(count)):
            written += piece.token_ids
            group = window_group(running)
            if WINDOW + 32 + page < len(written) < count:
                most = max(most, group["leased"] + group["protected"])
        assert written == output
        assert WINDOW <= most <= 2 * WINDOW + 3 * page + 2, f"{most} window slots for one request"
        group = window_group(running)
        assert group["evictable"] <= len(text) + 2 * WINDOW + 2 * page

        def found(length: int) -> int:
            whole = [*text, *output][:length]
            (result,) = serve(running, folder, [[*whole, 9]], 2)
            cached: int = result.usage.cached_tokens
            return cached

        end = (len(text) + count - 1) // page * page
        assert found(len(text) + count) == end
        middle = len(text) + count // 2
        assert len(text) // page * page - page <= found(middle) <= len(text)
        assert found(middle) == middle // page * page, "computed again, it is kept"
        assert found(len(text) + count) == (len(text) + count) // page * page


@pytest.mark.parametrize(
    ("arch", "page", "overlap", "drafter"),
    pairwise(["gemma3", "mistral"], [1, 4, 16, 64], ["off", "on"], [None, "Right", "Wrong", "Tree"]),
)
def test_a_scarce_pool_for_windows(
    tiny_model: Callable[[str], Path], arch: str, page: int, overlap: str, drafter: str | None
) -> None:
    """Eight requests at a time, three running: windows are evicted all the time, and nobody is retracted for them."""
    folder, count = tiny_model(arch), 24
    texts = prompts(8, low=20, high=90)
    tiny_reference(folder).learn(texts, count)
    truth = [[*text, *tiny_reference(folder).greedy(text, count)[0]] for text in texts]
    sections = scarce(page, engine={"overlap": overlap})
    with engine(folder, drafter=drafter, texts=truth, **sections) as running:
        for _ in range(2):
            serve(running, folder, texts, count)
        stats = running.stats()
        if arch == "gemma3":
            full, window = stats["groups"]
            assert window["total"] < full["total"] // 2 or page == 64
        assert stats["retractions"] == 0
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])


def test_the_promise_with_a_scarce_pool(tiny_model: Callable[[str], Path]) -> None:
    """what-breaks 9: the newest conversations are found to their ends, whatever became of middles and older ones."""
    folder, count = tiny_model("gemma3"), 30
    texts = prompts(12, low=60, high=60, shared=0)
    with engine(folder, **scarce()) as running:
        kept = []
        for text in texts:
            (result,) = serve(running, folder, [text], count)
            kept.append([*text, *result.token_ids])
        full, window = running.stats()["groups"]
        assert full["evictable"] > window["total"], "more tokens are cached than windows have slots"
        for text in reversed(kept[-6:]):
            (result,) = serve(running, folder, [[*text, 5]], 2)
            assert result.usage.cached_tokens == len(text) - 1


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_prompt_sent_again_is_found(tiny_model: Callable[[str], Path], page: int) -> None:
    """As many conversations as the pool promises two windows each: their prompts are found, and their ends."""
    folder, count, every = tiny_model("gemma3"), 20, 512
    cache = {"use": "swa", "tokens": 4096, "page_size": page, "window_every": every}
    schedule = {"max_running": 1, "max_tokens_per_step": 16, "chunk": 16}
    texts = prompts(12, low=64, high=99, shared=0)
    with engine(folder, cache=cache, schedule=schedule) as running:
        ended = [[*text, *running.generate(text, greedy(count)).token_ids] for text in texts]
        newest, find = 4096 // every // 2, running.core.ledger.cache.peek
        assert window_group(running)["total"] < 12 * 2 * WINDOW, "not all of them can be"
        for text, whole in list(zip(texts, ended, strict=True))[-newest:]:
            assert find(array("i", text), len(text) - 1, Namespace()) == (len(text) - 1) // page * page
            assert find(array("i", whole), len(whole), Namespace()) == (len(whole) - 1) // page * page
        for text, whole in list(zip(texts, ended, strict=True))[-3:]:
            again, turn = serve(running, folder, [text, [*whole, 5]], 4)
            assert again.usage.cached_tokens == (len(text) - 1) // page * page
            assert turn.usage.cached_tokens == (len(whole) - 1) // page * page


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
def test_retraction_and_aborts(tiny_model: Callable[[str], Path], arch: str) -> None:
    """A pool of about two requests; some are given up on the way. All others write the same, nothing is lost."""
    folder = tiny_model(arch)
    texts = prompts(8, low=20, high=60)
    sections = {"cache": {"use": "swa", "tokens": 160}, "schedule": {"chunk": 16}, "engine": {"overlap": "on"}}
    with engine(folder, **sections) as running:
        for cut in (1, 3, 9, 20):
            stream = running.stream(texts[cut % 8], greedy(40))
            for _ in range(cut):
                next(stream)
            stream.close()
            serve(running, folder, texts, 24)
        assert running.stats()["retractions"] > 0 or arch == "mistral"
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])


def test_the_default_goes_by_the_models_groups(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """`auto`; who requires something of the cache is held to what it came to, and refusals name that."""
    for arch, cache in (("llama", "RadixCache"), ("gemma3", "SwaCache"), ("mistral", "SwaCache")):
        with engine(tiny_model(arch)) as running:
            assert type(running.core.ledger.cache).__name__ == cache
    picky = tmp_path / "picky.py"
    base = "from phloem.plugins.schedule.fcfs import Fcfs\n\n"
    picky.write_text(f'{base}class Picky(Fcfs):\n    requires = ("cache:narrows",)\n')
    policy = {"use": f"{picky}:Picky"}
    with engine(tiny_model("gemma3"), schedule=policy) as running:
        assert running.generate([5, 6], greedy(2)).token_ids
    with pytest.raises(ConfigError, match=r"needs cache with narrows; cache 'radix' has none\n.*\n.*cache: auto"):
        engine(tiny_model("llama"), schedule=policy)
    with pytest.raises(ConfigError, match=f"'swa' keeps a window of {WINDOW} tokens .* would have 8 slots"):
        engine(tiny_model("gemma3"), cache={"tokens": 8})


def test_a_pool_below_the_window_is_refused(tiny_model: Callable[[str], Path]) -> None:
    """With the arithmetic, and what to do."""
    folder = tiny_model("gemma3")
    with pytest.raises(ConfigError, match=f"a window of {WINDOW} tokens .* the pool would have 8 slots"):
        engine(folder, cache={"use": "swa", "tokens": 8})
    with engine(folder, cache={"use": "swa", "tokens": 8}, engine={"context_length": 8}) as running:
        assert running.core.info.max_total_tokens == 8


def test_bytes_are_split(tiny_model: Callable[[str], Path]) -> None:
    """All pools together keep within `size` and use it, and more tokens fit than where every layer keeps them."""
    size, tokens = 4 * 2**20, {}
    for cache in ("swa", "radix"):
        sections = {"cache": {"use": cache, "tokens": None, "size": size}, "schedule": SCARCE["schedule"]}
        with engine(tiny_model("gemma3"), **sections) as running:
            kv = running.core.ledger.kv
            held = sum(tensor.numel() * tensor.element_size() for tensor in (*kv.keys, *kv.values))
            assert 0.99 * size < held <= size
            tokens[cache] = running.stats()["groups"][0]["total"]
            if cache == "swa":
                assert " tokens of window 16 x " in running.core.parts.memory
    assert tokens["swa"] > 2.5 * tokens["radix"], "one layer of three keeps everything"


@pytest.mark.parametrize(
    ("arch", "policy"), [("gemma3", "lpm"), ("mistral", "dfs-weight"), ("gemma3", "hrrn"), ("mistral", "priority")]
)
def test_choices_are_scored_behind_windows_under_any_policy(
    tiny_model: Callable[[str], Path], arch: str, policy: str
) -> None:
    """Trees of choices, cold and warm, between requests that write, score as where nothing is shared or given back."""
    folder, count = tiny_model(arch), 6
    texts = prompts(6, low=WINDOW - 2, high=3 * WINDOW, shared=WINDOW // 2)
    choices = [[5, 6, 7], [5, 6], [5, 6, 8, 9], [7], [8, 5]]
    with engine(folder, cache={"use": "chunk", "tokens": 4096}) as running:
        alone = [running.score(text, choices) for text in texts]
    for page in (1, 4):
        made = scarce(page, schedule={**SCARCE["schedule"], "use": policy})
        with engine(folder, **made) as running:
            for _ in ("cold", "warm"):
                for text, expected in zip(texts, alone, strict=True):
                    for mine, theirs in zip(running.score(text, choices), expected, strict=True):
                        assert mine == pytest.approx(theirs, abs=1e-4)
                serve(running, folder, texts, count)
