"""Every backend under every feature: whole outputs are in their language, and the features change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from specimens import Specimen, specimens

from equivalence.constrained import ALL, Ask, Got, asks, judged, run, same
from equivalence.harness import TOYS, engine, pairwise, prompts
from phloem import Engine
from phloem.errors import RequestError

PROMPTS = prompts(25, high=30)
ROOMY = 16384
SMALL = 320  # slots; of about sixty requests at once, of up to 210 tokens each
TIGHT = 480  # likewise, of a quarter of the matrix
Drafts = tuple[str, ...]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def spec(drafters: Drafts, wanted: Sequence[Ask], plain: Sequence[Got]) -> list[dict[str, Any]]:
    """Drafters by name; the toy ones know what the plain engine wrote."""
    pairs = [(ask, got) for ask, got in zip(wanted, plain, strict=True) if not isinstance(got, RequestError)]
    texts = [[*ask.prompt, *got.token_ids] for ask, got in pairs]
    toys = {name: {"use": f"{TOYS}:{name}", "texts": texts} for name in drafters}
    return [{"use": "grammar"} if name == "grammar" else toys[name] for name in drafters]


def varied(wanted: Sequence[Ask], shift: int) -> list[Ask]:
    """Streams and several choices, in every combination with what differs already."""
    ways = ((1, False), (2, True), (1, True), (3, False), (1, False))
    chosen = [ways[(i + shift) % len(ways)] for i in range(len(wanted))]
    return [ask.with_(n=n, stream=stream) for ask, (n, stream) in zip(wanted, chosen, strict=True)]


def warm_and_cut(running: Engine, wanted: Sequence[Ask], plain: Sequence[Got]) -> None:
    """Once more, the prompts cached, and only half of what was written allowed: the first half, called `length`."""
    pairs = [(a, g) for a, g in zip(wanted, plain, strict=True) if not isinstance(g, RequestError)]
    pairs = [(a.with_(max_tokens=len(g.token_ids) // 2), g) for a, g in pairs if len(g.token_ids) > 1]
    again = [a for a, _ in pairs]
    halves = run(running, again)
    same(again, halves, [g for _, g in pairs])
    for ask, half in zip(again, halves, strict=True):
        assert not isinstance(half, RequestError)
        assert half.finish_reason == "length"
        assert half.usage.cached_tokens == len(ask.prompt) - 1


def floors(counts: dict[str, int], chosen: Sequence[Specimen]) -> None:
    """Most specimens are taken by each backend, and most outputs are whole."""
    kinds = sum(1 for one in chosen if one.kind == "json_schema")
    assert counts["run over xgrammar"] > 0.85 * kinds
    assert counts["run over llguidance"] > 0.95 * kinds
    assert counts["run over outlines"] > 0.7 * kinds
    assert counts["stop"] > 10 * counts["length"]


def test_outputs_are_valid_and_the_same_with_everything_on(llama: Path) -> None:
    """what-breaks 30, 31, 38: one plain engine and one with all features, three backends in each batch."""
    chosen = list(specimens(25))
    wanted = asks(chosen, PROMPTS)
    with engine(llama, grammar=ALL, spec=[], cache={"tokens": ROOMY}) as running:
        plain = run(running, wanted)
        floors(judged(wanted, plain), chosen)
        warm_and_cut(running, wanted[::5], plain[::5])
        running.check()
    some, expected = varied(wanted[::3], 0), plain[::3]
    sections: dict[str, Any] = {"cache": {"tokens": SMALL}, "schedule": {"chunk": 5}, "engine": {"overlap": "on"}}
    with engine(llama, grammar=ALL, spec=spec(("grammar", "Ngram"), wanted, plain), **sections) as running:
        got = run(running, some)
        judged(some, got)
        same(some, got, expected)
        stats = running.stats()
        assert stats["retractions"] > 0
        assert stats["accepted_tokens"] > 100
        running.check()


# --- the whole matrix


DRAFTS: list[Drafts] = [(), ("grammar",), ("grammar", "Right"), ("Wrong", "grammar"), ("grammar", "Tree"), ("Ngram",)]
AXES = (DRAFTS, [3, 512], [1, 4], ["off", "on"], [ROOMY, TIGHT], ["radix", "chunk"])


@pytest.fixture(scope="module")
def written(llama: Path) -> tuple[list[Ask], list[Got]]:
    """What the plain engine writes under a few hundred schemas over each backend."""
    chosen = list(specimens(273))
    wanted = asks(chosen, prompts(40, high=30))
    with engine(llama, grammar=ALL, spec=[], cache={"tokens": ROOMY}) as running:
        plain = run(running, wanted)
        warm_and_cut(running, wanted[::5], plain[::5])
    floors(judged(wanted, plain), chosen)
    return wanted, plain


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("row", range(len(pairwise(*AXES))))
def test_pairs_of_features(llama: Path, written: tuple[list[Ask], list[Got]], row: int) -> None:
    """Each row takes another part of the requests, so that all meet every value of each axis."""
    drafters, chunk, page, overlap, pool, cache = pairwise(*AXES)[row]
    wanted, plain = (part[row % 4 :: 4] for part in written)
    some = varied(wanted, row)
    sections = {
        "cache": {"use": cache, "tokens": pool, "page_size": page},
        "schedule": {"chunk": chunk},
        "engine": {"overlap": overlap},
    }
    with engine(llama, grammar=ALL, spec=spec(drafters, *written), **sections) as running:
        got = run(running, some)
        judged(some, got)
        same(some, got, plain)
        running.check()
        stats = running.stats()
    assert stats["retractions"] > 0 or pool == ROOMY
    assert stats["accepted_tokens"] > 500 or not {"grammar", "Right"} & set(drafters)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1200)
def test_the_default_model() -> None:
    """About twenty schemas and the other kinds: greedy and hot, with the grammar's drafts and without."""
    chosen = list(specimens(21, seed=7))
    with Engine("smollm2-135m", grammar=ALL, spec=[], cache={"tokens": ROOMY}) as running:
        texts = ["Write it as JSON:", "Order 66:", "größe:", "The capital of Norway is", '{"name": "Ada"']
        wanted = asks(chosen, [running.tokenizer.encode(text) for text in texts])
        plain = run(running, wanted)
        floors(judged(wanted, plain), chosen)
        warm_and_cut(running, wanted[::4], plain[::4])
    with Engine("smollm2-135m", grammar=ALL, cache={"tokens": 4096}, schedule={"chunk": 16}) as running:
        some = varied(wanted, 1)
        got = run(running, some)
        judged(some, got)
        same(some, got, plain)
        assert running.stats()["accepted_tokens"] > 500
