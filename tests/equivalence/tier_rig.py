"""Engines with small pools over tiers, what is asked of them, and devices that stop."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phloem import Engine

from .harness import assert_same, engine, greedy, tiny_reference

FAULTY = f"{Path(__file__).with_name('faulty_storage.py')}:Faulty"
BLOCK, POOL, OUT = 64, 512, 6


def text(seed: int, length: int, shared: int = 0) -> list[int]:
    """Random tokens; the first `shared` are the same for all seeds."""
    rng, same = random.Random(seed), random.Random(-1)
    return [same.randrange(4, 500) for _ in range(shared)] + [rng.randrange(4, 500) for _ in range(length - shared)]


@contextmanager
def tiered(
    path: Path, kv: Path | None = None, *, storage: str = "file", host: Any = "64MiB", **sections: Any
) -> Iterator[Engine]:
    """An engine with a small pool over host memory (None: without), and a disk where `kv` is given."""
    cache: dict[str, Any] = {"tokens": POOL, **sections.pop("cache", {})}
    if host is not None:
        cache["host"] = host if isinstance(host, dict) else {"size": host}
    if kv is not None:
        cache["disk"] = {"use": storage, "path": str(kv), "size": "64MiB", **sections.pop("disk", {})}
    with engine(path, cache=cache, **sections) as made:
        yield made
        eventually(lambda: not made.stats()["tiers"]["loading"])
        made.check()


def eventually(holds: Callable[[], bool]) -> None:
    """Things come about on other threads."""
    wait = threading.Event()
    for _ in range(2000):
        if holds():
            return
        wait.wait(0.005)
    raise AssertionError("it did not come about in ten seconds")


def run(made: Engine, prompt: list[int], **call: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were cached."""
    result = made.generate(prompt, greedy(OUT), **call)
    return result.outputs[0].token_ids, result.usage.cached_tokens


def crowd(made: Engine, first: int = 901) -> None:
    """Fill the pool with other texts."""
    for seed in range(first, first + 3):
        made.generate(text(seed, 300), greedy(2))


def tier(made: Engine, name: str, what: str) -> int:
    return int(made.stats()["tiers"][name][what])


def stored(made: Engine, blocks: int) -> None:
    """The background has written so many blocks."""
    eventually(lambda: tier(made, "disk", "written") >= blocks)


def device(made: Engine) -> Any:
    """The storage."""
    assert made.core.ledger.tiers is not None
    return made.core.ledger.tiers._shelf._storage


def same(path: Path, prompt: list[int], got: list[int], what: str) -> None:
    assert_same(got, *tiny_reference(path).greedy(prompt, OUT), what)


def whole(prompt: list[int]) -> int:
    """Tokens of a prompt's blocks, without its last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


class Loading:
    """A request on a thread of its own."""

    def __init__(self, made: Engine, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.cached = -1
        self.thread = threading.Thread(target=self._run, args=(made, prompt), daemon=True)
        self.thread.start()
        eventually(lambda: made.stats()["tiers"]["loading"] == 1)
        self.call_id = next(iter(made.core._calls))

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def _run(self, made: Engine, prompt: list[int]) -> None:
        self.tokens, self.cached = run(made, prompt)


@contextmanager
def loading(
    path: Path, kv: Path, prompt: list[int], kept: list[int] | None = None, **sections: Any
) -> Iterator[tuple[Engine, Loading]]:
    """A request whose prefix is being read by a device that has stopped; `kept` of it is in the pool."""
    with tiered(path, kv, storage=FAULTY, host=None, **sections) as made:
        run(made, prompt)
        stored(made, 4)
        made.flush_cache()
        if kept:
            made.generate(kept, greedy(1))
        device(made).gate.clear()
        try:
            yield made, Loading(made, prompt)
        finally:
            device(made).gate.set()
