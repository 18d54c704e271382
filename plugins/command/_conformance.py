"""Runs the conformance suite of a plugin's kind with pytest, in a folder of its own."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

from phloem.config_yaml import parse_value
from phloem.errors import ConfigError, PluginError
from phloem.registry import Registry

_TEST = '''"""Written by `phloem plugins check`."""
from phloem.registry import Registry
from phloem.testing import {suite}


class TestConformance({suite}):
    plugin = Registry().load({kind!r}, {use!r})
'''


def check(kind: str, use: str, attributes: Sequence[str] = ()) -> int:
    """pytest's verdict as an exit code; `attributes` are `name=value` texts for the suite class.

    Raises PluginError if the plugin cannot be loaded, the kind has no suite, or pytest is not installed.
    """
    from phloem.testing import SUITES

    if kind not in SUITES:
        raise PluginError(f"kind '{kind}' has no conformance suite (kinds that have: {', '.join(SUITES)})")
    if importlib.util.find_spec("pytest") is None:
        raise PluginError("the conformance suites need pytest", hint="pip install 'phloem[testing]'")
    if ".py" in use:
        path, _, attribute = use.rpartition(":") if ".py:" in use else (use, "", "")
        use = f"{Path(path).resolve()}:{attribute}"
    Registry().load(kind, use)  # a plugin that cannot be loaded is one message, not a failed collection
    text = _TEST.format(suite=SUITES[kind], kind=kind, use=use)
    for setting in attributes:
        name, equals, value = setting.partition("=")
        problems: list[str] = []
        data = parse_value(value, f"--set {setting}", problems)
        if not equals or not name.isidentifier() or problems:
            raise ConfigError(problems or f"--set {setting}: expected name=value")
        text += f"    {name} = {data!r}\n"
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "test_conformance.py")
        file.write_text(text, encoding="utf-8")
        config = Path(folder, "pytest.ini")
        config.write_text("[pytest]\n", encoding="utf-8")
        return int(
            pytest.main(["-q", "-p", "no:cacheprovider", "--disable-plugin-autoload", "-c", str(config), str(file)])
        )
