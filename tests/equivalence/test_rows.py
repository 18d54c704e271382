"""What drafters keep at the target's slots is found where a token's K and V are, whatever the cache does with these.

Ids and positions are kept, and looked at in every step: no rounding hides a row that is another token's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equivalence.harness import TOYS, engine, pairwise, prompts, serve, tiny_reference

COUNT = 16
Tiny = Callable[[str], Path]

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
        "spec": [{"use": f"{TOYS}:Remembers", "texts": texts}],
    }
    if host and cache != "chunk":
        sections["cache"]["host"] = {"size": "8MiB"}
    with engine(folder, **sections) as running:
        for _ in range(2):
            serve(running, folder, asked, COUNT)
        running.check()
        stats = running.stats()
        [(_, drafter)] = running.core.parts.drafting.drafters
    assert stats["drafter_failures"] == {}
    assert drafter.looked > 20
    assert stats["accepted_tokens"] > 20
