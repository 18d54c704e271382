"""Tables and JSON schemas of all options, made from the classes themselves, so that they cannot drift."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from phloem.config import exact_section
from phloem.config_layers import LISTS, PLAIN, SLOTS
from phloem.config_sections import ComponentsSection, HostSection, PinSection, PluginSection, Section
from phloem.errors import PluginError
from phloem.registry import AUTO, Registry


def options_table(options: type[BaseModel]) -> str:
    """A Markdown table of a model's fields; empty for a model without any."""
    shapes = _inline(options.model_json_schema()).get("properties", {})
    rows = [
        f"| `{name}` | {_words(shapes[name])} | {_default(field)} | {_cell(field.description)} |"
        for name, field in options.model_fields.items()
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows]) if rows else ""


def reference(registry: Registry | None = None) -> str:
    """Markdown of every section's own options, then of each installed plugin's; unusable plugins say why."""
    registry = registry or Registry()
    parts = []
    for path, (_, section) in SLOTS.items():
        if len(path) == 1:
            parts.append(_section(f"`{path[0]}`", section))
        if path == ("cache",):
            parts += [_section("`cache.host`", HostSection), _section("`cache.pins`", PinSection)]
    parts += [_section(f"`{name}`", section) for name, section in PLAIN.items()]
    kinds = sorted({kind for kind, _ in [*SLOTS.values(), *LISTS.values()]} | {"api"})
    for kind in kinds:
        for name in registry.names(kind):
            try:
                plugin = registry.load(kind, name)
            except PluginError as error:
                parts.append(f"### {kind} `{name}`\n\nNot usable here: {error.message}.")
                continue
            doc = (plugin.__doc__ or "").strip().partition("\n")[0]
            parts.append(f"### {kind} `{name}`\n\n{doc}\n\n{options_table(plugin.Options) or 'No options.'}")
    return "\n\n".join(parts) + "\n"


def schema(registry: Registry | None = None) -> tuple[dict[str, Any], list[str]]:
    """A JSON schema over all installed plugins, and why some could not be included.

    Each section is one of its plugins' exact shapes, told apart by `use`.
    """
    registry = registry or Registry()
    problems: list[str] = []
    nested = {kind: _choices(registry, kind, PluginSection, problems) for kind in ("eviction", "key", "component")}
    each = dict.fromkeys(ComponentsSection.model_fields, nested.pop("component"))
    nested["components"] = {"type": "object", "additionalProperties": False, "properties": each}
    nested["disk"] = _choices(registry, "storage", PluginSection, problems)
    properties: dict[str, Any] = {}
    for path, (kind, section) in SLOTS.items():
        if len(path) == 1:
            properties[str(path[0])] = _choices(registry, kind, section, problems)
    for shape in properties["cache"]["anyOf"]:
        if "properties" in shape:
            shape["properties"] |= nested
    one = properties["attention"]
    pair = {"type": "object", "additionalProperties": False, "properties": {"prefill": one, "decode": one}}
    properties["attention"] = {"anyOf": [*one["anyOf"], pair]}
    for name, (kind, section) in LISTS.items():
        properties[name] = {"type": "array", "items": _choices(registry, kind, section, problems)}
    for name, plain in PLAIN.items():
        properties[name] = _inline(TypeAdapter(plain).json_schema())
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "phloem configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    return document, problems


def _section(title: str, section: type[Section]) -> str:
    return f"### {title}\n\n{section.__doc__}\n\n{options_table(section)}"


def _choices(registry: Registry, kind: str, base: type[PluginSection], problems: list[str]) -> dict[str, Any]:
    names = registry.names(kind)
    words = [
        *names,
        *(["auto"] if kind in AUTO else []),
        *(["none"] if kind in ("grammar", "events", "key", "storage") else []),
    ]
    shapes: list[dict[str, Any]] = [{"type": "string"} if kind == "model" else {"enum": words}]
    for use in words:
        try:
            exact = exact_section(base, registry, kind, use)
        except PluginError as error:
            problems.append(f"{kind}.{use}: {error.message}")
            continue
        shape = _inline(TypeAdapter(exact).json_schema())
        shape["properties"]["use"] = {"const": use, "description": shape["properties"]["use"].get("description", "")}
        default = base.model_fields["use"].get_default()
        if use != default:
            shape["required"] = sorted({*shape.get("required", []), "use"})
        shapes.append(shape)
    stranger = {"type": "object", "required": ["use"], "properties": {"use": {"type": "string", "pattern": ":|\\.py$"}}}
    return {"anyOf": [*shapes, stranger]}


def _inline(shape: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$defs`: shapes of many models are merged into one document, where names could clash."""
    definitions = shape.pop("$defs", {})

    def expand(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                rest = {key: value for key, value in node.items() if key != "$ref"}
                return expand(definitions[node["$ref"].rpartition("/")[2]]) | rest
            return {key: expand(value) for key, value in node.items()}
        return [expand(item) for item in node] if isinstance(node, list) else node

    expanded: dict[str, Any] = expand(shape)
    return expanded


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")  # of a table, a line


def _words(shape: dict[str, Any]) -> str:
    if shape.get("format") == "size":
        return "size"
    if "enum" in shape:
        return " or ".join(f"`{value}`" for value in shape["enum"])
    if "anyOf" in shape:
        return " or ".join(dict.fromkeys(_words(part) for part in shape["anyOf"]))
    if shape.get("type") == "array":
        return f"list of {_words(shape['items'])}" if isinstance(shape.get("items"), dict) else "list"
    names = {
        "object": "mapping",
        "null": "nothing",
        "number": "number",
        "integer": "integer",
        "boolean": "true or false",
    }
    kind = str(shape.get("type", "any"))
    return f"`{shape['const']}`" if "const" in shape else names.get(kind, kind)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "see meaning"
    value = field.get_default()
    if isinstance(value, BaseModel):
        value = value.use if isinstance(value, PluginSection) else {name: one.use for name, one in value}
    value = list(value) if isinstance(value, tuple) else value
    return "–" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"
