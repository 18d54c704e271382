"""The route sets of a server: each entry of `server.apis` is a plugin's name, or a mapping of `use` and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phloem.config_sections import name_and_options
from phloem.interfaces import Api, PluginContext
from phloem.registry import Registry, construct

Entry = str | Mapping[str, Any]


def api_name(entry: Entry) -> str:
    """The plugin's name."""
    return name_and_options(entry)[0]


def build_apis(entries: Sequence[Entry], parsers: Mapping[str, Any]) -> list[Api]:
    """The plugins, in order. Raises PluginError for one that cannot be used; options were checked with the config."""
    made: list[Api] = []
    for entry in entries:
        name, given = name_and_options(entry)
        plugin = Registry().load("api", name)
        context = PluginContext("api", name, extras={"parsers": parsers})
        made.append(construct("api", name, plugin, plugin.Options(**given), context))
    return made
