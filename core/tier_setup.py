"""Builds the tiers that a configuration asks for, and says with numbers and places why some cannot be."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config_yaml import KeyPath, dotted
from .errors import ConfigError, PhloemError
from .events import DEFAULT_BLOCK
from .registry import Registry

if TYPE_CHECKING:
    from .config import Config
    from .config_sections import PluginSection
    from .executor import Executor
    from .interfaces import Model, Quant
    from .ledger import Ledger
    from .states import StateStore
    from .tier_blocks import Layout
    from .tiers import Tiers

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_READ_BYTES = 1 << 22


def chosen(config: Config) -> list[KeyPath]:
    """The tiers that are configured, from the pool down."""
    there = {"host": config.cache.host is not None, "disk": config.cache.disk.use != "none"}
    return [("cache", tier) for tier, wanted in there.items() if wanted]


def unmet_by_cache(config: Config, cache: tuple[str, frozenset[str]] | None = None) -> Iterator[str]:
    """A problem for each tier where the cache cannot be spread over tiers, and for what only a cache that shares has.

    `cache` is its name and capabilities, for one that was chosen by `auto`; without it such a one is not judged.
    """
    if cache is None and config.cache.plugin is not None:
        cache = config.cache.use, config.cache.plugin.capabilities
    own, able = cache or ("", frozenset({"tiers", "sharing"}))
    shared = {"pin_share": config.cache.pin_share > 0, "eviction": config.cache.eviction.use != "lru"}
    wanted: list[tuple[KeyPath, str]] = [(path, "tiers") for path in chosen(config)]
    wanted += [(("cache", name), "sharing") for name, asked in shared.items() if asked]
    for path, need in wanted:
        if need not in able:
            name, mark = config.origin(path)
            place = mark.place if mark else name
            problem = f"{place}: {dotted(path)}: needs a cache with {need}; cache '{own}' has none"
            yield "\n".join([problem, *_quotes(config, path, ("cache", "use"))])


def build_tiers(
    config: Config,
    cache: str,
    ledger: Ledger,
    model: Model,
    quant: Quant,
    states: StateStore | None,
    make: Callable[..., Any],
    post: Callable[[Callable[[], object]], None],
    executor: Executor,
) -> Tiers | None:
    """The tiers below the cache of that name, wired to the ledger; None where none are configured. Raises ConfigError.

    `make(kind, section, **context)` builds a plugin, `post` is that of `Loads`. With a disk all of the
    model's files are read. Called last: what fails after it would leave a store open.
    """
    if not chosen(config):
        return None
    from .tier_blocks import Layout, Rows
    from .tier_loads import Loads
    from .tier_shelf import Shelf
    from .tiers import Tiers
    from .windows import needed_from

    problems = list(unmet_by_cache(config, (cache, ledger.cache.capabilities)))
    if problems:
        raise ConfigError(problems)
    page, host = config.cache.page_size, config.cache.host
    size = -(-DEFAULT_BLOCK // page) * page
    needs = tuple(0 if window is None else needed_from(size, window, page) for window in ledger.windows)
    layout = Layout(size, Rows(ledger.kv, len(ledger.pools), states), needs)
    least, arithmetic = _least(layout)
    if host is not None and host.size < least:
        raise _too_small(config, "host", host.size, arithmetic)
    if host is not None:
        _check_room(config, host.size, ledger, states)
    storage = None
    if config.cache.disk.use != "none":
        _check_disk(config, model, least, arithmetic)
        most = max(layout.block_bytes, layout.state_bytes)
        extras = {"identity": identity(config, model, quant, ledger, layout), "block_bytes": most}
        try:
            storage = make("storage", config.cache.disk, extras=extras)
        except PhloemError as error:
            raise ConfigError(f"{_place(config, 'disk')}: cache.disk: {error.message}", hint=error.hint) from error
    shelf = Shelf(layout, 0 if host is None else host.size, storage, getattr(config.cache.disk, "size", 1 << 62))
    write = "through" if host is None else host.write
    return Tiers(ledger, shelf, Loads(ledger, shelf, layout, post, executor.in_order), layout, write)


def _least(layout: Layout) -> tuple[int, str]:
    """Bytes of what a tier must hold to be of use, and the arithmetic."""
    tokens, head = f"{layout.size} tokens x {layout.token_bytes:,} bytes", layout.head_bytes
    least, one = layout.block_bytes + layout.state_bytes, f"one block of {tokens} + {head}"
    if layout.state_bytes:
        one = f"{one}, and one state of {layout.state_bytes - head:,} bytes + {head},"
    return least, f"{one} = {least:,} bytes"


def _check_room(config: Config, size: int, ledger: Ledger, states: StateStore | None) -> None:
    """Host memory must be there, beside the pool where that lies in it as well: neither has been touched yet."""
    import torch

    from .memory import GIB, free_bytes

    every = [*ledger.kv.keys, *ledger.kv.values, *(one for own in (states.tensors if states else ()) for one in own)]
    both = [tensor for tensor in every if tensor.device.type == "cpu"]
    pool, free = sum(tensor.numel() * tensor.element_size() for tensor in both), free_bytes(torch.device("cpu"))
    if size + pool > free:
        beside = f" beside the KV pool's {pool / GIB:,.2f} GiB" if pool else ""
        problem = f"{_place(config, 'host')}: cache.host.size {size / GIB:,.2f} GiB{beside}, but only {free / GIB:,.2f}"
        raise ConfigError(f"{problem} GiB are free", hint=f"set it to {max(0, free - pool) >> 20}MiB or less")


def _check_disk(config: Config, model: Model, each: int, arithmetic: str) -> None:
    """What must hold of blocks of `each` bytes, and of the model, before a storage is made."""
    from .tier_shelf import BACKLOG

    if getattr(config.cache.disk, "size", each) < each:
        raise _too_small(config, "disk", getattr(config.cache.disk, "size", each), arithmetic)
    problem = f"{_place(config, 'disk')}: cache.disk:"
    if each > BACKLOG:
        problem = f"{problem} {arithmetic}, more than the {BACKLOG:,} bytes that may wait to be written"
        raise ConfigError(problem, hint="set a smaller cache.page_size, or leave the disk out")
    if "adapters" in model.spec.capabilities:
        problem = f"{problem} stored KV belongs to one set of weights, and adapters are known by their names only"
        raise ConfigError(problem, hint="leave the disk out, or serve the model without adapters")


def _too_small(config: Config, tier: str, size: int, arithmetic: str) -> ConfigError:
    problem = f"{_place(config, tier)}: cache.{tier}.size {size:,} bytes is less than {arithmetic}"
    return ConfigError(problem, hint="raise it, such as to 2GiB; a number without a suffix is bytes")


def _quotes(config: Config, *paths: KeyPath) -> list[str]:
    """The lines that say so, where there are any."""
    marks = [(path, config.origin(path)[1]) for path in paths]
    return [f"    {mark.place}: {mark.text}" if mark else f"    default: {dotted(path)}" for path, mark in marks]


def _place(config: Config, tier: str) -> str:
    name, mark = config.origin(("cache", tier, "size"))
    return mark.place if mark else name


# --- what stored KV depends on


def identity(config: Config, model: Model, quant: Quant, ledger: Ledger, layout: Any) -> dict[str, Any]:
    """All that must agree before stored KV may be used, as plain data; names of fields are for messages."""
    from .tier_blocks import FORMAT

    tokenizer = json.dumps([model.tokenizer.json, sorted(model.tokenizer.special_tokens.items())])
    return {
        "format": FORMAT,
        "model": fingerprint(model),
        "loader": _source(model),
        "loader_version": _version(type(model)),
        "options": _options(config.model, model),
        "quant": [_source(quant), _options(config.quant, quant)],
        "tokenizer": hashlib.sha256(tokenizer.encode("utf-8", "surrogatepass")).hexdigest(),
        "dtype": model.spec.dtype,
        "page_size": ledger.page_size,
        "block": layout.size,
        "groups": [[window, width] for window, width in zip(ledger.windows, layout.rows.widths, strict=False)],
        "states": [list(map(list, state.shapes)) for state in model.spec.states],
        "key": config.cache.key.model_dump(mode="json"),
        **({"drafters": list(ledger.kv.marks)} if ledger.kv.marks else {}),
    }


def _source(plugin: object) -> str:
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}"


def _options(section: PluginSection, plugin: Any) -> dict[str, Any]:
    """A plugin's options, also of one that `auto` has chosen."""
    options = section.options() if section.plugin is not None else plugin.Options()
    given: dict[str, Any] = options.model_dump(mode="json")
    return given


def _version(plugin: type[Any]) -> str:
    """The release of the distribution that a model plugin is from; empty for a file of somebody's own."""
    root = plugin.__module__.partition(".")[0]
    return next((found.version for found in Registry().found("model") if re.split("[.:]", found.target)[0] == root), "")


def fingerprint(model: Model) -> str:
    """A hash over weights and configuration, about a second for a gigabyte. ConfigError where there are none."""
    path = Path(model.path)
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in inside if file.is_file() and (file.suffix in _WEIGHTS or file.name == "config.json")]
    if not any(file.suffix in _WEIGHTS for file in files):
        problem = f"cache.disk: stored KV belongs to one set of weights, and there are none to be read at {model.path}"
        raise ConfigError(problem, hint="serve the model from a folder or a file, or leave the disk out")
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            own = hashlib.sha256()
            while piece := opened.read(_READ_BYTES):
                own.update(piece)
        whole.update(f"{file.suffix} {own.hexdigest()}\n".encode())
    return whole.hexdigest()
