"""Finds plugins by entry-point metadata, loads only the named ones, and checks that they keep their contract."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import PhloemError, PluginError

if TYPE_CHECKING:
    from .config_sections import PluginSection
    from .interfaces import PluginContext

KINDS = (
    *("cache", "component", "eviction", "key", "events", "storage", "spec", "grammar", "attention", "quant"),
    *("schedule", "model", "sampler", "parser", "api", "transport", "router", "observer"),
)
AUTO: dict[str, tuple[str, ...]] = {"model": ("native", "transformers"), "attention": ("cpu", "torch")}
AUTO |= {"grammar": ("xgrammar", "llguidance", "outlines"), "cache": ("radix", "swa", "hybrid")}
AUTO |= {"quant": ("stored", "none")}
OPTIONAL = frozenset({"grammar", "events", "key", "storage"})  # kinds of which `use: none` means no plugin
_PROTOCOLS = {
    **{"cache": "Cache", "eviction": "Eviction", "schedule": "Policy", "attention": "Attention", "model": "Model"},
    **{"spec": "Drafter", "grammar": "Grammar", "sampler": "LogitsProcessor", "api": "Api", "parser": "Parser"},
    **{"events": "Events", "key": "KeyScheme", "component": "Component", "storage": "Storage"},
    "quant": "Quant",
}
_OURS = "phloem"


@dataclass(frozen=True, slots=True)
class Found:
    """One installed plugin as its metadata tells it; nothing of it has been imported."""

    kind: str
    name: str
    target: str  # module:Class
    distribution: str
    version: str
    entry: metadata.EntryPoint = field(repr=False, compare=False)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A parenthesis for an error message: the nearest known word, else the list of them."""
    options = sorted(set(known))
    near = difflib.get_close_matches(word, options, n=1)
    if near:
        return f"(did you mean '{near[0]}'?)"
    return f"(known: {', '.join(options)})" if options else "(none is installed)"


@functools.lru_cache(maxsize=8)
def _scan(paths: tuple[str, ...], changed: tuple[int, ...]) -> Mapping[tuple[str, str], list[Found]]:
    """All plugins by kind and name. Some hundred files are read; kept until a folder has `changed`."""
    every: dict[tuple[str, str], list[Found]] = {}
    seen: set[str] = set()
    for dist in metadata.distributions(path=list(paths)):
        entries = [entry for entry in dist.entry_points if entry.group.startswith("phloem.")]
        name, version = (dist.metadata["Name"], dist.version) if entries else ("", "")
        if not entries or name in seen:  # an earlier copy on the path shadows a later one, as for imports
            continue
        seen.add(name)
        for entry in entries:
            kind = entry.group.removeprefix("phloem.")
            found = Found(kind, entry.name, entry.value, name, version, entry)
            every.setdefault((kind, entry.name), []).append(found)
    return every


def _changed(folder: str) -> int:
    """When something was last installed into a folder of the path, in ns; 0 for what is no folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


class Registry:
    """The plugins installed on `path` (default: sys.path), read once, from metadata only."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        paths = tuple(sys.path) if path is None else tuple(path)
        self._found = _scan(paths, tuple(map(_changed, paths)))

    def found(self, kind: str | None = None) -> list[Found]:
        """Every installed plugin (of a kind), duplicates included, ordered by kind and name."""
        return [f for key in sorted(self._found) if kind in (None, key[0]) for f in self._found[key]]

    def names(self, kind: str) -> list[str]:
        """The names that `use:` may say for a kind."""
        return [name for k, name in sorted(self._found) if k == kind]

    def find(self, kind: str, name: str) -> Found:
        """The one plugin of that name. Raises PluginError if there is none, or more than one distribution has it."""
        owners = self._found.get((kind, name), [])
        if not owners:
            raise PluginError(f"no {kind} plugin is named '{name}' {did_you_mean(name, self.names(kind))}")
        if len(owners) > 1:
            others = sorted({f"'{owner.distribution}' {owner.version}" for owner in owners})
            ours = any(owner.distribution == _OURS for owner in owners)
            reserved = "; names of built-in plugins are reserved" if ours else ""
            raise PluginError(
                f"{kind} plugin '{name}' is provided by {' and by '.join(others)}{reserved}",
                hint="uninstall one of them, or name the class itself: use: module:Class",
            )
        return owners[0]

    def load(self, kind: str, use: str) -> type[Any]:
        """The class behind `use:`: an entry point's name, `module:Class`, or `path/to/file.py:Class`.

        Raises PluginError saying why it cannot be used and what to do. Called once per named plugin and process.
        """
        loaded: type[Any] = self.resolve(kind, use)
        check_contract(kind, f"{kind} plugin '{use}'", loaded)
        return loaded

    def resolve(self, kind: str, use: str) -> Any:
        """What `load` returns, not held to the contract of a kind: commands are such objects."""
        label = f"{kind} plugin '{use}'"
        local = ".py:" in use or use.endswith(".py")
        found = None if local or ":" in use else self.find(kind, use)
        target = found.target if found else use
        name, _, attribute = target.rpartition(":") if ":" in target else (target, "", "")
        file = Path(name).resolve()
        if local and not file.is_file():
            raise PluginError(f"{label}: there is no file {file}", hint="paths are relative to the configuration file")
        try:
            module = _from_file(file) if local else importlib.import_module(name)
        except Exception as error:
            raise PluginError(f"{label} cannot be imported: {_why(error)}", hint=_repair(error, found)) from error
        return _attribute(label, module, attribute)

    def resolve_auto(self, kind: str, subject: Any) -> tuple[str, type[Any]]:
        """Name and class that `use: auto` means; PluginError lists why each candidate declined.

        Those of kind `model` are asked about a path, those of kind `cache` about the `ModelSpec` of a loaded model,
        those of the kinds `attention` and `quant` that have a say about the `PluginContext` they would be made with.
        """
        asks = {"model": "supports"}.get(kind, "suits")
        reasons: list[str] = []
        for name in AUTO[kind]:
            try:
                cls = self.load(kind, name)
                ask = getattr(cls, asks, None)
                reason = ask(subject) if ask else None
            except PluginError as error:
                reason = f"{error.message}; {error.hint}" if error.hint else error.message
            if reason is None:
                return name, cls
            reasons.append(f"{name}: {reason}")
        what = getattr(subject, "name", subject)
        raise PluginError(f"no {kind} plugin can serve {what}:\n  " + "\n  ".join(reasons))


def build(kind: str, choice: PluginSection | str, context: PluginContext) -> Any:
    """Construct the plugin that a config section (or a bare name, with default options) chooses.

    None for `use: none` of an `OPTIONAL` kind. `use: auto` is resolved by `context.extras["path"]`, for kinds that
    know no path by the context itself.
    Whatever the constructor raises becomes a PluginError that names the plugin, unless it is a PhloemError already.
    """
    use = choice if isinstance(choice, str) else choice.use
    if use == "none" and kind in OPTIONAL:
        return None
    if isinstance(choice, str) or choice.plugin is None:
        registry, subject = Registry(), context.extras.get("path", "") if kind == "model" else context
        plugin = registry.resolve_auto(kind, subject)[1] if use == "auto" else registry.load(kind, use)
        options = plugin.Options()
    else:
        plugin, options = choice.plugin, choice.options()
    return construct(kind, use, plugin, options, context)


def construct(kind: str, use: str, plugin: type[Any], options: Any, context: PluginContext) -> Any:
    """An instance; whatever the constructor raises becomes a PluginError, as `build` says."""
    try:
        return plugin(options, context)
    except PhloemError:
        raise
    except Exception as error:
        raise PluginError(f"{kind} plugin '{use}' failed to start: {type(error).__name__}: {error}") from error


def _from_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"phloem_local_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "the name ends in .py"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic look their own module up
    spec.loader.exec_module(module)
    return module


def _attribute(label: str, module: ModuleType, attribute: str) -> Any:
    value = getattr(module, attribute, None) if attribute else None
    if value is not None:
        return value
    classes = [n for n, c in vars(module).items() if isinstance(c, type) and hasattr(c, "api")]
    wanted = f"has no class '{attribute}'" if attribute else "needs a class: file.py:Class"
    raise PluginError(f"{label}: {module.__name__} {wanted} {did_you_mean(attribute, classes)}")


def _why(error: Exception) -> str:
    where = f" ({error.filename}:{error.lineno})" if isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{where}"


def _repair(error: Exception, found: Found | None) -> str | None:
    """The pip line that should mend a failed import."""
    missing = error.name if isinstance(error, ImportError) else None
    if found is None:
        return f"install the package that provides the module '{missing}'" if missing else None
    if found.distribution != _OURS:
        return f"pip install --upgrade {found.distribution}"
    extra = extra_of(found, (missing or "").partition(".")[0])
    return f"pip install '{_OURS}[{extra}]'" if extra else None


def extra_of(found: Found, module: str = "") -> str | None:
    """The extra of a plugin's distribution that it needs: the one of its name, else the one that brings `module`."""
    dist = found.entry.dist
    extras = (dist.metadata.get_all("Provides-Extra") or []) if dist else []
    if found.name in extras:
        return found.name
    wanted = module.replace("_", "-").lower()
    for requirement in (dist.requires or []) if dist and wanted else []:
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([^'\"]+)", requirement)
        if match and match[1].replace("_", "-").lower() in (wanted, f"py{wanted}") and match[2] not in ("all", "dev"):
            return match[2]
    return None


def check_contract(kind: str, label: str, cls: Any) -> None:
    from pydantic import BaseModel

    from . import interfaces

    if not isinstance(cls, type):
        raise PluginError(f"{label} is not a class")
    spoken = getattr(cls, "api", None)
    if spoken is None:
        raise PluginError(f"{label} breaks the contract of its kind: the class has no `api = {interfaces.API}`")
    if spoken != interfaces.API:
        raise PluginError(
            f"{label} speaks plugin API {spoken}, this phloem speaks {interfaces.API}",
            hint="install a release of the plugin made for this phloem, or the phloem it was made for",
        )
    problems: list[str] = []
    options = getattr(cls, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        problems.append("it has no `Options`, a pydantic model")
    elif options.model_config.get("extra") != "forbid" or not options.model_config.get("frozen"):
        problems.append('its `Options` are not frozen with extra="forbid"')
    capabilities = getattr(cls, "capabilities", None)
    if not isinstance(capabilities, (frozenset, set)):
        problems.append("it has no `capabilities`, a frozenset of strings")
    for need in getattr(cls, "requires", ()):
        if need.partition(":")[0] not in KINDS or not need.partition(":")[2]:
            problems.append(f"`requires` has '{need}', which is no kind:capability")
    if kind in _PROTOCOLS:
        problems += _method_problems(getattr(interfaces, _PROTOCOLS[kind]), cls)
    if problems:
        raise PluginError(f"{label} breaks the contract of its kind: {'; '.join(problems)}")


def _method_problems(protocol: type[Any], cls: type[Any]) -> Iterable[str]:
    for name, declared in vars(protocol).items():
        bound = isinstance(declared, classmethod)
        if name.startswith("_") or not (bound or inspect.isfunction(declared)):
            continue
        method = getattr(cls, name, None)
        parameters = list(inspect.signature(declared.__func__ if bound else declared).parameters)
        call = f"{name}({', '.join(parameters[1:])})"
        if not callable(method):
            yield f"it has no method {call}"
            continue
        try:
            inspect.signature(method).bind(*(parameters[1:] if bound else parameters))
        except TypeError as error:
            yield f"{call} cannot be called: {error}"
