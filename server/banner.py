"""What `phloem serve` prints once the model is loaded: model, memory, plugins, URL, and a line to try."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phloem.interfaces import ServiceInfo
from phloem.registry import Registry

from .wire import Ready


def show_banner(ready: Ready, url: str, apis: tuple[str, ...], *, key_needed: bool) -> None:
    """Print the banner to standard error. `plugins` of `ready` are by config section, several joined by commas."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", _model(ready.info))
    table.add_row("memory", Text(ready.memory))
    table.add_row("plugins", Text(_plugins({**ready.plugins, "api": ", ".join(apis)})))
    table.add_row("url", Text(url, style="green"))
    title = f"phloem {metadata.version('phloem')}"
    console = Console(stderr=True)
    console.print(Panel(table, title=title, title_align="left", border_style="green"))
    # outside the frame, on one line: to be copied
    console.print(Text(_curl(url, ready.info.model_name, key_needed=key_needed)), soft_wrap=True)


def _model(info: ServiceInfo) -> Text:
    spec = info.spec
    return Text(
        f"{info.model_name}  ({spec.dtype}, {len(spec.layers)} layers, vocabulary {spec.vocab_size:,}, "
        f"at most {info.max_total_tokens:,} tokens per request)\n{info.model_path}"
    )


def _plugins(chosen: Mapping[str, str]) -> str:
    """`cache.radix 0.1.0`, one per chosen plugin."""
    registry = Registry()
    shown = []
    for section, names in chosen.items():
        kind = {"observers": "observer", "samplers": "sampler"}.get(section, section)
        for name in names.split(", "):
            if name and name != "none":
                versions = [found.version for found in registry.found(kind) if found.name == name]
                shown.append(f"{kind}.{name} {versions[0] if versions else ''}".rstrip())
    return ", ".join(shown)


def _curl(url: str, model: str, *, key_needed: bool) -> str:
    key = "-H 'Authorization: Bearer KEY' " if key_needed else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
