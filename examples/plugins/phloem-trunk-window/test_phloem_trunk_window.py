"""trunk-window keeps the promises of every component, and its own."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from phloem_trunk_window import TrunkWindow

from phloem.request import Namespace
from phloem.testing import ComponentSuite

TRUNK, WINDOW = 20, 8


class TestTrunkWindow(ComponentSuite):
    plugin = TrunkWindow
    options: ClassVar[Mapping[str, Any]] = {"trunk": TRUNK}
    examples = 10

    @pytest.mark.parametrize("trunk", [TRUNK, 1])
    def test_a_second_conversation_finds_the_system_prompt(self, trunk: int) -> None:
        """Where windows are scarce, and as far as it is a trunk: a text of another kind has come between."""
        self.options = {"trunk": trunk}  # type: ignore[misc]
        rig = self.inside().rig(1, 150, (None, WINDOW))  # 150 full slots, 100 for windows
        first, other, second = (array("i", range(n * 1000, n * 1000 + 60)) for n in range(3))
        system = array("i", range(9000, 9000 + TRUNK))
        rig.serve(system + first)
        rig.serve(other)
        assert rig.start(system + second, Namespace()).found == trunk
