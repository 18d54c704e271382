"""The route sets of a server: each entry of `server.apis` is a plugin's name, or a mapping of `use` and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from phloem.errors import ConfigError
from phloem.interfaces import Api, PluginContext
from phloem.registry import Registry, construct

Entry = str | Mapping[str, Any]


def api_name(entry: Entry) -> str:
    """The plugin's name."""
    return entry if isinstance(entry, str) else str(entry["use"])


def build_apis(entries: Sequence[Entry], parsers: Mapping[str, Any]) -> list[Api]:
    """The plugins, in order. Raises PluginError for one that cannot be used, ConfigError for wrong options."""
    made: list[Api] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        name = api_name(entry)
        plugin = Registry().load("api", name)
        given = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "use"}
        try:
            options = plugin.Options.model_validate(given)
        except ValidationError as error:
            problems += [_problem(f"server.apis[{index}]", name, plugin, one) for one in error.errors()]
            continue
        context = PluginContext("api", name, extras={"parsers": parsers})
        made.append(construct("api", name, plugin, options, context))
    if problems:
        raise ConfigError(problems)
    return made


def _problem(place: str, name: str, plugin: type[Any], error: Any) -> str:
    """One line of a validation error."""
    if error["type"] == "extra_forbidden":
        known = ", ".join(plugin.Options.model_fields) or "none"
        return f"{place}.{error['loc'][0]}: api plugin '{name}' has no such option (known: {known})"
    where = ".".join([place, *map(str, error["loc"])])
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{where}: {message}, got {error['input']!r}"
