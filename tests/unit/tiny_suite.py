"""The conformance suite of models on tiny random ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from phloem.testing.model import ModelSuite


class TinySuite(ModelSuite):
    """Subclass it and set `plugin`, and `arch` to a key of `support.ARCHITECTURES` or `RECURRENT`."""

    arch: ClassVar[str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def folder(cls, tiny_model: Callable[[str], Path]) -> None:
        """The model is made when the first test of the class asks for it."""
        cls.path = str(tiny_model(cls.arch))
