"""What tests of the language share: a model, one server (a start costs more than what is done with it), a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import Live
from scripted import Scripted


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


@pytest.fixture
def backend() -> Iterator[Scripted]:
    """A backend on which nothing may be left when the test has ended."""
    made = Scripted()
    yield made
    assert made.open == 0
    assert made.running == 0
