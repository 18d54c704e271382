"""The layers of a configuration: --set, arguments, environment, YAML, defaults; each knows where its values stand."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from . import config_sections as s
from .config_yaml import KeyPath, Mark, dotted, parse_file, parse_value
from .errors import ConfigError

log = logging.getLogger("phloem.config")

SLOTS: dict[tuple[str, ...], tuple[str, type[s.PluginSection]]] = {
    ("model",): ("model", s.ModelSection),
    ("quant",): ("quant", s.QuantSection),
    ("cache",): ("cache", s.CacheSection),
    ("cache", "eviction"): ("eviction", s.PluginSection),
    ("cache", "key"): ("key", s.PluginSection),
    **{("cache", "components", group): ("component", s.PluginSection) for group in s.ComponentsSection.model_fields},
    ("cache", "disk"): ("storage", s.PluginSection),
    ("schedule",): ("schedule", s.ScheduleSection),
    ("grammar",): ("grammar", s.GrammarSection),
    ("attention",): ("attention", s.AttentionSection),
    ("attention", "prefill"): ("attention", s.AttentionSection),
    ("attention", "decode"): ("attention", s.AttentionSection),
    ("events",): ("events", s.EventsSection),
}
LISTS: dict[str, tuple[str, type[s.PluginSection]]] = {
    "spec": ("spec", s.SpecSection),
    "observers": ("observer", s.ObserverSection),
    "samplers": ("sampler", s.SamplerSection),
}
PLAIN: dict[str, type[s.Section]] = {"engine": s.EngineSection, "server": s.ServerSection}
SECTIONS = PLAIN | {path[0]: section for path, (_, section) in SLOTS.items() if len(path) == 1}
NAMES = (*SECTIONS, *LISTS)
_BARE = (
    ("grammar", "also"),
    ("server", "apis"),
    ("server", "tool_parser"),
    ("server", "reasoning_parser"),
)  # plugins too
_PREFIX = "PHLOEM_"


@dataclass(slots=True)
class Layer:
    """One source of values, as nested plain data; `base` is the folder that its relative plugin files start from."""

    name: str
    data: dict[str, Any]
    marks: dict[str, Mark] = field(default_factory=dict)  # by dotted path
    base: str = ""

    def mark(self, path: KeyPath) -> Mark | None:
        """Where this layer gives the value at `path`, or the nearest thing that holds it."""
        known = (self.marks.get(dotted(path[:n])) for n in range(len(path), 0, -1))
        return next((mark for mark in known if mark), None)

    def place(self, path: KeyPath) -> str:
        """What messages call that place."""
        mark = self.mark(path)
        within = (held.place for at, held in self.marks.items() if at.startswith(f"{dotted(path)}."))
        return mark.place if mark else ", ".join(within) or self.name


def read_layers(
    path: str | None, sets: Sequence[str], sections: Mapping[str, Any], env: Mapping[str, str], problems: list[str]
) -> list[Layer]:
    """The layers, lowest first, in the long form. Adds problems; raises ConfigError for an unreadable file."""
    layers = [_default_layer()]
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: cannot read the configuration: {reason}") from error
        layers.append(Layer("yaml", *parse_file(text, str(path), problems), os.path.dirname(os.path.abspath(path))))
    layers += [_env_layer(env, problems), _argument_layer(sections), _set_layer(sets, problems)]
    problems += _unknown_variables(env, layers)
    _normalise(layers, problems)
    return layers


def _set_layer(sets: Sequence[str], problems: list[str]) -> Layer:
    """The layer of `--set a.b=value` options; a later one wins."""
    layer = Layer("set", {}, base=os.getcwd())
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(f"--set {text}: expected section.option=value")
        else:
            _put(layer, tuple(key.split(".")), value, Mark(f"--set {text}", text), problems)
    return layer


def _env_layer(env: Mapping[str, str], problems: list[str]) -> Layer:
    """The layer of `PHLOEM_SECTION__OPTION` variables; others with that prefix are found by `_unknown_variables`."""
    layer = Layer("env", {}, base=os.getcwd())
    for name in sorted(env):
        path = tuple(name.removeprefix(_PREFIX).lower().split("__"))
        if name.startswith(_PREFIX) and path[0] in NAMES:
            _put(layer, path, env[name], Mark(name, f"{name}={env[name]}"), problems)
    return layer


def _argument_layer(sections: Mapping[str, Any]) -> Layer:
    """The layer of the library's keyword arguments."""
    data = {name: _plain(value) for name, value in sections.items()}
    marks = {name: Mark(f"argument {name}", f"{name}={value!r}") for name, value in data.items()}
    return Layer("argument", data, marks, os.getcwd())


def _default_layer() -> Layer:
    """The lowest layer: it only names plugins; every other default lives on the section or `Options` class."""
    data: dict[str, Any] = {name: [] for name in LISTS} | {name: {} for name in PLAIN}
    data |= {name: {"use": cls.model_fields["use"].default} for name, cls in SECTIONS.items() if name not in PLAIN}
    data["spec"] = [{"use": "grammar"}]
    if importlib.util.find_spec("xgrammar") is None:  # an extra: nobody asked for it
        data["grammar"]["use"] = "none"
    data["cache"]["components"] = s.ComponentsSection().model_dump()
    data["cache"] |= {
        name: {"use": s.CacheSection.model_fields[name].default.use} for name in ("eviction", "key", "disk")
    }
    return Layer("default", data)


def _unknown_variables(env: Mapping[str, str], layers: Iterable[Layer]) -> Iterator[str]:
    """Problems for `PHLOEM_*` variables that set nothing and that no secret refers to."""
    held = (value for layer in layers for _, value in walk(layer.data))
    secrets = {value["env"] for value in held if isinstance(value, dict) and list(value) == ["env"]}
    options = [(name, option) for name, section in SECTIONS.items() for option in section.model_fields]
    known = {name: name for name in NAMES} | {f"{name}__{option}": f"{name}__{option}" for name, option in options}
    known |= {option: f"{name}__{option}" for name, option in options}  # PHLOEM_PORT lacks its section
    for name in sorted(env):
        rest = name.removeprefix(_PREFIX).lower()
        if name.startswith(_PREFIX) and rest.split("__")[0] not in NAMES and name not in secrets:
            near = difflib.get_close_matches(rest, known, n=1)
            hint = f"did you mean '{_PREFIX}{known[near[0]].upper()}'?" if near else "expected PHLOEM_SECTION__OPTION"
            yield f"{name}: unknown variable ({hint})"


def _normalise(layers: Sequence[Layer], problems: list[str]) -> None:
    """Rewrite short forms, drop empty sections, make plugin files absolute; `layers` are lowest first."""
    for layer in layers:
        layer.data = {name: value for name, value in layer.data.items() if value is not None}
        for path in SLOTS:
            parent = get(layer.data, path[:-1])
            if isinstance(parent, dict) and path[-1] in parent:
                _expand(layer, parent, path, problems)
        for name in LISTS:
            items = layer.data.get(name, [])
            if not isinstance(items, list):
                problems.append(f"{layer.place((name,))}: {name}: must be a list of plugins")
                del layer.data[name]
                items = []
            for i in range(len(items)):
                _expand(layer, items, (name, i), problems)
        for owner, key in _BARE:
            held = layer.data.get(owner)
            if isinstance(held, dict) and key in held:
                held[key] = _absolute(layer, held[key])
    _settle_attention(layers, problems)
    if any(get(layer.data, ("cache", "disk")) for layer in layers[1:]):  # whoever says more than nothing wants one
        layers[0].data["cache"]["disk"]["use"] = "file"
    for path, (_, section) in SLOTS.items():
        _drop_overridden(layers, path, set(section.model_fields))
    for i, layer in enumerate(layers):
        for place, value in walk(layer.data):
            secret = isinstance(value, dict) and list(value) in (["env"], ["file"])
            for lower in layers[:i] if secret else ():  # {env: A} below {file: B} is no mapping of both
                if isinstance(held := get(lower.data, place), dict):
                    held.clear()


def get(data: Any, path: KeyPath) -> Any:
    """The value at `path` in nested dicts and lists, or None."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value within plain data or a model, itself included, with its path."""
    yield path, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, BaseModel):
        items = [(name, getattr(value, name)) for name in type(value).model_fields]
    for key, item in items:
        yield from walk(item, (*path, key))


def _expand(layer: Layer, parent: Any, path: KeyPath, problems: list[str]) -> None:
    key: Any = path[-1]
    value = parent[key]
    if isinstance(value, str):
        value = parent[key] = {"path" if path == ("model",) else "use": value}
    use = value.get("use") if isinstance(value, dict) else 0
    if use is not None and not isinstance(use, str):
        what = "use: must be a plugin's name" if isinstance(value, dict) else "must be a plugin's name or a mapping"
        problems.append(f"{layer.place(path)}: {dotted(path)}: {what}, got {use if use != 0 else value!r}")
        parent[key] = {"use": ""} if isinstance(parent, list) else {}
    elif isinstance(use, str):
        value["use"] = _absolute(layer, use)


def _absolute(layer: Layer, use: Any) -> Any:
    """A plugin's name, where it is a file with its folder; of a list and of a mapping with `use` each in it."""
    if isinstance(use, list):
        return [_absolute(layer, one) for one in use]
    if isinstance(use, dict):
        return {key: _absolute(layer, one) if key == "use" else one for key, one in use.items()}
    is_file = isinstance(use, str) and (".py:" in use or use.endswith(".py"))
    return os.path.normpath(os.path.join(layer.base, os.path.expanduser(use))) if is_file else use


def _settle_attention(layers: Sequence[Layer], problems: list[str]) -> None:
    """One kernel or a pair: the highest layer that mentions attention decides; lower ones give up the other form."""
    pair_keys = {"prefill", "decode"}
    spoken = [layer for layer in layers[1:] if layer.data.get("attention")]
    if not spoken:
        return
    pair = bool(pair_keys & set(spoken[-1].data["attention"]))
    for layer in spoken:
        section = layer.data["attention"]
        foreign = [key for key in section if (key in pair_keys) != pair]
        if layer is spoken[-1] and foreign:
            mark = layer.place(("attention", foreign[0]))
            problems.append(f"{mark}: attention.{foreign[0]}: give either one kernel or {{prefill, decode}}, not both")
        for key in foreign:
            log.info("%s: attention.%s is overridden by %s", layer.name, key, spoken[-1].name)
            del section[key]
    if pair:
        layers[0].data["attention"] = {"prefill": {"use": "auto"}, "decode": {"use": "auto"}}


def _drop_overridden(layers: Sequence[Layer], path: KeyPath, core_fields: set[str]) -> None:
    """Options meant for the plugin that a lower layer chose are no options of the one that a higher layer chose."""
    use: str | None = None
    effective: list[tuple[dict[str, Any], Layer, str | None]] = []
    for layer in layers:
        section = get(layer.data, path)
        if isinstance(section, dict):
            use = section.get("use", use)
            effective.append((section, layer, use))
    for section, layer, chosen in effective:
        for key in [key for key in section if chosen != use and key not in core_fields]:
            place = layer.place((*path, key))
            log.warning("%s: %s was an option of '%s'; dropped, since '%s' is used", place, key, chosen, use)
            del section[key]


def _put(layer: Layer, path: tuple[str, ...], text: str, mark: Mark, problems: list[str]) -> None:
    value = parse_value(text, mark.place, problems)
    node = layer.data
    for part in path[:-1]:
        inner = node.get(part)
        if not isinstance(inner, dict):
            inner = node[part] = {} if inner is None else {"use": inner}
        node = inner
    held = node.get(path[-1])
    if isinstance(held, dict) and isinstance(value, (dict, str)):
        held.update(value if isinstance(value, dict) else {"use": value})
    else:
        node[path[-1]] = value
    layer.marks[dotted(path)] = mark


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else copy.deepcopy(value)
