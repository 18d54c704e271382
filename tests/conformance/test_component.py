"""The built-in components, and the one in the docs, pass the suite that any component can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from phloem.plugins.cache.components import Full, Recurrent, Window
from phloem.testing import ComponentSuite

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "component.md"


def documented() -> Any:
    """The component that the page shows."""
    snippet = re.search(
        r'^```python title="keep_beginnings.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert snippet
    names: dict[str, Any] = {"__name__": "keep_beginnings"}
    exec(compile(snippet[1], "keep_beginnings.py", "exec", dont_inherit=True), names)
    return names["KeepBeginnings"]


class TestFull(ComponentSuite):
    plugin = Full
    group = "full"
    examples = 5  # as `radix`, in its suite


class TestWindow(ComponentSuite):
    plugin = Window
    examples = 5


class TestRecurrent(ComponentSuite):
    plugin = Recurrent
    group = "recurrent"
    examples = 5


class TestDocumented(ComponentSuite):
    plugin = documented()
    examples = 2
