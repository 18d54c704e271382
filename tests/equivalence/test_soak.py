"""Long random traffic against a small pool: every slot comes back, nothing leaks, and the engine still writes right."""

from __future__ import annotations

import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from equivalence.harness import assert_same, engine, greedy, prompts, tiny_reference
from phloem import Engine, SamplingParams
from phloem.errors import PhloemError


def traffic(running: Engine, seed: int, requests: int) -> None:
    """One client: random prompts, lengths, salts, constraints on n and seeds, and aborts in the middle of streams."""
    rng = random.Random(seed)
    texts = prompts(12, seed=3)
    for _ in range(requests):
        prompt = rng.choice(texts)[: rng.randint(1, 60)] + [rng.randrange(4, 500) for _ in range(rng.randint(0, 5))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randint(1, 24),
            n=rng.choice([1, 1, 1, 2]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logprobs=rng.choice([None, 0, 2]),
            stop=rng.choice([[], ["e"], [" the"]]),
        )
        important = rng.choice([0, 0, 100])
        stream = running.stream(prompt, params, salt=rng.choice([None, None, "a", "b"]), priority=important)
        for read, _ in enumerate(stream):
            if rng.random() < 0.03 * read:
                stream.close()
                break


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("arch", "overlap", "page", "drafter", "requests"),
    [
        ("llama", "off", 1, None, 3_600),
        ("llama", "off", 4, "Wrong", 3_600),
        ("llama", "on", 1, "Wrong", 10_000),
        ("gemma3", "on", 4, "Wrong", 3_600),
        ("lfm2", "on", 4, "Wrong", 3_600),
        ("mamba2", "off", 1, None, 3_600),
    ],
)
def test_ten_thousand_requests(
    tiny_model: Callable[[str], Path], arch: str, overlap: str, page: int, drafter: str | None, requests: int
) -> None:
    """what-breaks 24: memory in use climbs with the number of requests served."""
    folder = tiny_model(arch)
    # Admission foresees too well for a pool to force retractions; important requests do.
    sections = {
        "cache": {"tokens": 240, "page_size": page},
        "schedule": {"use": "priority", "chunk": 16, "max_running": 8},
        "engine": {"overlap": overlap},
    }
    failed: list[Exception] = []
    with engine(folder, drafter=drafter, **sections) as running:

        def client(seed: int, requests: int) -> None:
            try:
                traffic(running, seed, requests)
            except (PhloemError, AssertionError) as error:
                failed.append(error)

        client(0, 200)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        threads = [threading.Thread(target=client, args=(seed, (requests - 200) // 8)) for seed in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB
        stats = running.stats()
        assert stats["retractions"] > 0
        assert stats["evicted_tokens"] > 0
        assert stats["running"] == stats["waiting"] == 0
        for prompt in prompts(4):
            assert_same(running.generate(prompt, greedy(8)).token_ids, *tiny_reference(folder).greedy(prompt, 8))
        running.check()
        running.flush_cache()
        assert all(group["free"] == group["total"] for group in running.stats()["groups"])
