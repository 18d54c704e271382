"""Two-phase configuration: plugin names are resolved first, then one exact typed model is built and validated once.

    load_config("engine.yaml", sets=["cache.page_size=16"])

Precedence: `--set`, then keyword arguments, then `PHLOEM_SECTION__OPTION` variables, then YAML, then defaults. This is
the only module that reads the environment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError, create_model
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from . import config_sections as s
from .config_layers import LISTS, NAMES, SLOTS, Layer, get, read_layers, walk
from .config_yaml import KeyPath, Mark, dotted
from .errors import ConfigError, PluginError
from .registry import AUTO, OPTIONAL, Registry, did_you_mean
from .tier_setup import unmet_by_cache


class Config(BaseSettings):
    """A resolved configuration. Each plugin section is a subclass that carries the chosen plugin's options as well."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: s.ModelSection
    quant: s.QuantSection
    cache: s.CacheSection
    schedule: s.ScheduleSection
    grammar: s.GrammarSection
    attention: s.AttentionSection | s.AttentionPair
    events: s.EventsSection
    engine: s.EngineSection
    server: s.ServerSection
    spec: tuple[s.SpecSection, ...]
    observers: tuple[s.ObserverSection, ...]
    samplers: tuple[s.SamplerSection, ...]

    layers: ClassVar[tuple[Layer, ...]] = ()  # lowest first

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers, highest first, instead of pydantic's own sources."""
        return tuple(InitSettingsSource(settings_cls, layer.data) for layer in reversed(cls.layers))

    def dump(self) -> dict[str, Any]:
        """Every resolved value as plain data; secrets show their source only."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which another process rebuilds this very configuration, places of values included."""
        return {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> Config:
        """The configuration that `to_dict` described; plugins are loaded, and secrets read, again."""
        layers = TypeAdapter(list[Layer]).validate_python(data["layers"])
        return _resolve(layers, os.environ if env is None else env, [])

    def origin(self, path: KeyPath) -> tuple[str, Mark | None]:
        """Which layer set the value at `path`, and where it stands there."""
        for layer in reversed(self.layers):
            if get(layer.data, path) is not None:
                return layer.name, layer.mark(path)
        return "default", None

    def check_requires(self, kind: str, name: str, capabilities: frozenset[str]) -> None:
        """Refuse plugins whose `requires` asks the given plugin for a capability that it lacks.

        The engine calls it for what is known only after loading: the model, and a cache chosen by `auto`.
        """
        problems = list(_unmet(self, {kind: [(name, capabilities, (kind,))]}))
        if problems:
            raise ConfigError(problems)


def load_config(
    path: str | None = None,
    *,
    sets: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """Load, layer, type and check a configuration; ConfigError lists everything that is wrong with it, with places.

    `path` is a YAML file, `sets` are `a.b=value` texts, `sections` maps section names to options as the YAML would,
    `env` stands in for the environment. Imports the plugins that are named, and only those.
    """
    env = os.environ if env is None else env
    problems: list[str] = []
    layers = read_layers(path, sets, sections or {}, env, problems)
    return _resolve(layers, env, problems)


def _resolve(layers: list[Layer], env: Mapping[str, str], problems: list[str]) -> Config:
    exact = _exact_model(layers, Registry(), problems)
    try:
        config = exact(**{})
    except ValidationError as error:
        problems += _explain(error, exact, layers)
        raise ConfigError(problems) from None
    for place, secret in walk(config):
        try:
            if isinstance(secret, s.Secret):
                secret.resolve(env)
        except ValueError as reason:
            problems.append(f"{_where(layers, place)}: {dotted(place)}: {reason}")
    if not problems:
        problems += [
            *_unmet(config, _static_providers(config)),
            *_undrawn(config),
            *unmet_by_cache(config),
        ]
    if problems:
        raise ConfigError(problems)
    return config


# --- phase 1: names become classes --------------------------------------------------------------------------------

_NO_SOURCE = {"use_attribute_docstrings": False}  # fields keep the docstrings of the classes that wrote them


def _exact_model(layers: Sequence[Layer], registry: Registry, problems: list[str]) -> type[Config]:
    """A Config whose sections are typed by the chosen plugins' options. An unusable plugin adds a problem."""

    def complain(path: KeyPath, error: PluginError) -> None:
        hint = f"; {error.hint}" if error.hint else ""
        problems.append(f"{_where(layers, path)}: {dotted(path)}: {error.message}{hint}")

    def section(path: KeyPath, kind: str, base: type[s.PluginSection]) -> type[s.PluginSection]:
        uses = (get(layer.data, (*path, "use")) for layer in reversed(layers))
        use = next((use for use in uses if use is not None), None)
        try:
            if use:  # a list item without it is reported by validation, or was when it was normalised
                return exact_section(base, registry, kind, use)
        except PluginError as error:
            complain((*path, "use"), error)
        return create_model(base.__name__, __base__=base, __cls_kwargs__={"extra": "allow"})

    fields: dict[str, Any] = {}
    for path, (kind, base) in SLOTS.items():
        if "use" not in (get(layers[0].data, path) or ()):  # attention is one kernel or a pair of them
            continue
        name, cls = path[0], section(path, kind, base)
        fields[name] = cls if len(path) == 1 else _with_section(fields.get(name, s.AttentionPair), path[1:], cls)
    for name, (kind, base) in LISTS.items():
        items = next(layer.data[name] for layer in reversed(layers) if name in layer.data)
        fields[name] = tuple.__class_getitem__(tuple(section((name, i), kind, base) for i in range(len(items))))
        uses = [s.sampler_name(str(item.get("use"))) for item in items] if name != "observers" else []
        for i, use in enumerate(uses):
            if use in uses[:i]:  # requests choose a sampler by its name, and what is learned of a drafter goes by it
                problems.append(f"{_where(layers, (name, i))}: {name}[{i}]: '{use}' is given twice")
    also = next((held for layer in reversed(layers) if (held := get(layer.data, ("grammar", "also")))), None)
    for i, use in enumerate(also if isinstance(also, (list, tuple)) else ()):
        try:
            registry.load("grammar", str(use))
        except PluginError as error:
            complain(("grammar", "also", i), error)
    exact: type[Config] = _with_fields(Config, fields)
    exact.layers = tuple(layers)
    return exact


def exact_section(base: type[s.PluginSection], registry: Registry, kind: str, use: str) -> type[s.PluginSection]:
    """The section class with the options of plugin `use` mixed in; PluginError if the plugin cannot be used."""
    if (use == "none" and kind in OPTIONAL) or (use == "auto" and kind in AUTO):
        return base
    plugin: Any = registry.load(kind, use)
    shared = {*base.model_fields, "plugin", "options"} & set(plugin.Options.model_fields)
    if shared:
        raise PluginError(f"{kind} plugin '{use}' declares the option '{shared.pop()}', which is the core's own")
    return _mixed(base, plugin)


@functools.lru_cache(maxsize=64)
def _mixed(base: type[s.PluginSection], plugin: type[Any]) -> type[s.PluginSection]:
    cls = create_model(base.__name__, __base__=(plugin.Options, base), __cls_kwargs__=_NO_SOURCE)
    cls.plugin = plugin
    return cls


def _with_section(outer: type[Any], path: tuple[str, ...], cls: type[s.PluginSection]) -> type[Any]:
    """`outer`, with the section at `path` within it typed as `cls`."""
    name, *rest = path
    inner: Any = outer.model_fields[name].annotation
    return _with_fields(outer, {name: _with_section(inner, tuple(rest), cls) if rest else cls})


def _with_fields(outer: type[Any], fields: Mapping[str, Any]) -> type[Any]:
    required: dict[str, Any] = {name: (cls, ...) for name, cls in fields.items()}
    exact: type[Any] = create_model(outer.__name__, __base__=outer, __cls_kwargs__=_NO_SOURCE, **required)
    return exact


# --- phase 2: problems are put into words ---------------------------------------------------------------------------


def _where(layers: Sequence[Layer], path: KeyPath) -> str:
    """The place of the value at `path`, or of the nearest thing that holds it and was given at all."""
    for held in (path[:n] for n in range(len(path), 0, -1)):
        for layer in layers[:0:-1]:
            if get(layer.data, held) is not None:
                return layer.place(held)
    return layers[0].name


def _explain(error: ValidationError, exact: type[Config], layers: Sequence[Layer]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        path: KeyPath = tuple(detail["loc"])
        kind, value = detail["type"], detail["input"]
        message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        message = message.replace("must be a valid tuple", "must be a list")
        if kind == "default_factory_not_called":  # follows from another error
            continue
        if kind == "extra_forbidden":
            if len(path) == 1:
                message = f"unknown section {did_you_mean(str(path[-1]), NAMES)}"
            else:
                message = f"unknown key {did_you_mean(str(path[-1]), _known_keys(exact, path[:-1]))}"
        elif kind == "missing":
            message = "is required"
        elif kind not in ("secret", "plugin") and isinstance(value, (str, int, float)):
            message += f", got {value!r}"
        yield f"{_where(layers, path)}: {dotted(path)}: {message}"


def _known_keys(cls: Any, path: KeyPath) -> Sequence[str]:
    for part in path:
        cls = get_args(cls)[part] if isinstance(part, int) else cls.model_fields[part].annotation
        if not isinstance(cls, type) and get_origin(cls) is not tuple:  # `Model | None`
            cls = next((a for a in get_args(cls) if hasattr(a, "model_fields")), cls)
    return list(getattr(cls, "model_fields", ()))


# --- phase 3: capabilities ----------------------------------------------------------------------------------------


def plugin_sections(config: Config) -> Iterator[tuple[KeyPath, str, s.PluginSection]]:
    """Every plugin that the configuration chooses: where, of what kind, and its section."""
    for path, (kind, _) in SLOTS.items():
        section: Any = config
        for part in path:
            section = getattr(section, part, None)
        if isinstance(section, s.PluginSection):
            yield path, kind, section
    for name, (kind, _) in LISTS.items():
        for i, item in enumerate(getattr(config, name)):
            yield (name, i), kind, item


# Of each kind: name, capabilities and place of what is chosen.
_Providers = Mapping[str, Sequence[tuple[str, frozenset[str], KeyPath]]]


def _static_providers(config: Config) -> _Providers:
    """What can be judged before the model is known: the kinds that plugins require something of, but for the model."""
    chosen = list(plugin_sections(config))
    wanted = {need.partition(":")[0] for _, kind, item in chosen for need in _requires(kind, item)}
    later = {"model", "cache"} if config.cache.use == "auto" else {"model"}
    providers: dict[str, list[tuple[str, frozenset[str], KeyPath]]] = {kind: [] for kind in wanted - later}
    for path, kind, section in chosen:
        if kind in providers:
            auto = section.use == "auto"
            name = AUTO[kind][0] if auto else section.use
            plugin = Registry().load(kind, name) if auto else section.plugin
            providers[kind].append((name, getattr(plugin, "capabilities", frozenset()), path))
    return {kind: found or [("none", frozenset(), (kind,))] for kind, found in providers.items()}


def _requires(kind: str, section: s.PluginSection) -> frozenset[str]:
    """What a plugin asks of others, as its class says; a quant asks for a model that leaves its matrices to it."""
    own = frozenset(getattr(section.plugin, "requires", ()))
    return own | {"model:quant"} if kind == "quant" and section.use not in ("none", "auto") else own


def _unmet(config: Config, providers: _Providers) -> Iterator[str]:
    """A problem for each requirement on one of the providers that it does not meet."""
    for path, asking, section in plugin_sections(config):
        for need in sorted(_requires(asking, section)):
            kind, _, capability = need.partition(":")
            for name, capabilities, target in providers.get(kind, ()):
                if capability not in capabilities:
                    yield (
                        f"{_where(config.layers, path)}: {dotted(path)}: '{section.use}' needs {kind} with {capability}"
                        f"; {kind} '{name}' has none\n    {_quote(config, path)}\n    {_quote(config, target)}"
                    )


def _undrawn(config: Config) -> Iterator[str]:
    """Why drafts cannot be verified by rejection sampling, where that is asked for (design §6)."""
    if config.engine.verify != "rejection":
        return
    place = f"{_where(config.layers, ('engine', 'verify'))}: engine.verify: rejection"
    able = [(item.use, getattr(item.plugin, "capabilities", frozenset[str]())) for item in config.spec]
    followers = [(use, capabilities) for use, capabilities in able if "leads" not in capabilities]
    names = ", ".join(use for use, _ in followers) or "none"
    if len(followers) != 1:
        yield f"{place} is for one drafter: what several propose is merged, and no draw any more (spec has {names})"
    elif "drawn" not in followers[0][1]:
        yield f"{place} is for a drafter that draws what it proposes; '{names}' chooses (it does not declare `drawn`)"
    if config.engine.seed is not None:
        yield f"{place} repeats no output, which engine.seed asks for: leave one of them out"


def _quote(config: Config, path: KeyPath) -> str:
    use = (*path, "use")
    mark = config.origin(use)[1]
    return f"{mark.place}: {mark.text}" if mark else f"default: {dotted(path)}: {get(config.dump(), use)}"
