"""One server for all tests that need one: a start costs more than what they do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import Live


@pytest.fixture(scope="session")
def lang_model(tiny_model: Callable[[str], Path]) -> Path:
    """The folder of a tiny random model."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def lang_server(lang_model: Path) -> Iterator[Live]:
    """A live server with it."""
    with Live(lang_model) as server:
        yield server
        server.until(server.all_slots_back)
