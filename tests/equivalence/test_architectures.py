"""Every architecture the transformers plugin takes passes the equivalence test through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import ARCHITECTURES

from equivalence.test_matrix import check
from phloem import Engine
from phloem.errors import PhloemError

REFUSED = {"bloom": "ALiBi", "mpt": "ALiBi", "gpt_oss": "attention sinks"}
NATIVE = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in REFUSED])
def test_transformers_plugin(tiny_model: Callable[[str], Path], arch: str) -> None:
    stats = check(
        tiny_model(arch),
        drafter="Tree",
        most=4,
        model={"use": "transformers"},
        cache={"page_size": 4},
        schedule={"chunk": 16},
    )
    assert stats["accepted_tokens"] > 0


@pytest.mark.parametrize("arch", NATIVE)
def test_native_plugin(tiny_model: Callable[[str], Path], arch: str) -> None:
    stats = check(tiny_model(arch), drafter="Tree", most=4, model={"use": "native"}, schedule={"chunk": 16})
    assert stats["accepted_tokens"] > 0


@pytest.mark.parametrize(("arch", "reason"), REFUSED.items())
def test_what_cannot_be_served_exactly_is_refused_by_name(
    tiny_model: Callable[[str], Path], arch: str, reason: str
) -> None:
    with pytest.raises(PhloemError, match=reason):
        Engine(str(tiny_model(arch)))
