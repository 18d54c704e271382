"""`phloem plugins`: list what is installed, show one, run its conformance suite, scaffold a new distribution."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

from phloem.config import Config, load_config, plugin_sections
from phloem.errors import ConfigError, PluginError
from phloem.registry import AUTO, KINDS, Found, Registry, did_you_mean

from ._conformance import check
from ._reference import options_table
from ._scaffold import scaffold
from ._survey import survey
from ._table import table
from ._templates import BODIES

HEADER = ("kind", "name", "version", "distribution", "status", "description")


class Plugins:
    """The command's arguments and what they do."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """`phloem plugins` alone is `phloem plugins list`."""
        parser.add_argument("--json", action="store_true", help="print the list as JSON")
        actions = parser.add_subparsers(dest="action", metavar="list|show|check|new")
        listing = actions.add_parser("list", help="every installed plugin, without importing any")
        listing.add_argument("config", nargs="?", help="a YAML file: mark what it selects")
        listing.add_argument("--kind", choices=KINDS, help="only this kind")
        listing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        show = actions.add_parser("show", help="what a plugin does, its capabilities and options")
        show.add_argument("name", help="kind.name, or the name alone where it is unique")
        checking = actions.add_parser("check", help="run the conformance suite of its kind; needs pytest")
        checking.add_argument("name", help="kind.name, a unique name, or with --kind a file: ./mine.py:Mine")
        checking.add_argument("--kind", choices=KINDS, help="kind of a plugin named by file or module")
        checking.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="attribute of the suite, such as options"
        )
        new = actions.add_parser("new", help="write an installable distribution whose tests pass")
        new.add_argument("kind", help=", ".join(sorted(BODIES)))
        new.add_argument("name", help="what `use:` will say")
        new.add_argument("--into", type=Path, default=Path(), help="folder to create it in (default: here)")

    def run(self, args: argparse.Namespace) -> int:
        """Exit code 1 if a check fails."""
        if args.action == "show":
            print(_describe(_named(args.name)))
            return 0
        if args.action == "check":
            kind, use = (args.kind, args.name) if args.kind else _named(args.name)
            return check(kind, use, args.set)
        if args.action == "new":
            folder = scaffold(args.kind, args.name, args.into)
            print(f"created {folder}\n  cd {folder} && pip install -e '.[dev]' && pytest")
            return 0
        rows = _rows(getattr(args, "config", None), getattr(args, "kind", None))
        if args.json:
            print(json.dumps(rows, indent=2))
        else:
            print(table(HEADER, [[row[column] or "" for column in HEADER] for row in rows]))
            for row in rows:
                if row["remedy"]:
                    print(f"\n{row['kind']}.{row['name']}: {row['status']}: {row['remedy']}")
        return 0


def _rows(path: str | None, kind: str | None) -> list[dict[str, Any]]:
    """One mapping per installed plugin; `selected` ones are those of the configuration at `path`."""
    registry = Registry()
    try:
        chosen = _selected(load_config(path))
    except ConfigError:
        if path is not None:
            raise
        chosen = set()  # a plugin that spoils the defaults must not spoil the list that shows it
    rows = []
    for found in registry.found(kind):
        if found.kind not in KINDS:
            continue  # commands are in `phloem --help`
        facts = survey(found)
        status, remedy = facts.status, facts.remedy
        try:
            registry.find(found.kind, found.name)
        except PluginError as error:
            status, remedy = "duplicate", error.message
        if status == "ok" and (found.kind, found.name) in chosen:
            status = "selected"
        rows.append(
            {
                "kind": found.kind,
                "name": found.name,
                "version": found.version,
                "distribution": found.distribution,
                "status": status,
                "description": facts.description,
                "remedy": remedy,
            }
        )
    return rows


def _selected(config: Config) -> set[tuple[str, str]]:
    """(kind, name) of what a configuration uses; `auto` counts as its first candidate."""
    chosen = {(kind, section.use) for _, kind, section in plugin_sections(config)}
    chosen |= {(kind, AUTO[kind][0]) for kind, use in list(chosen) if use == "auto"}
    return chosen | {("api", api if isinstance(api, str) else str(api["use"])) for api in config.server.apis}


def _named(name: str) -> tuple[str, str]:
    """(kind, name) of `kind.name` or of a name that only one kind has."""
    found: list[Found] = [f for f in Registry().found() if f.kind in KINDS and name in (f.name, f"{f.kind}.{f.name}")]
    if not found and ":" in name:
        raise ConfigError(f"the kind of '{name}' is not known", hint="say --kind KIND: a file or module names none")
    if not found:
        known = [word for f in Registry().found() if f.kind in KINDS for word in (f.name, f"{f.kind}.{f.name}")]
        raise PluginError(f"no plugin is named '{name}' {did_you_mean(name, known)}")
    kinds = sorted({f.kind for f in found})
    if len(kinds) > 1:
        raise ConfigError(f"'{name}' is ambiguous: say {' or '.join(f'{kind}.{name}' for kind in kinds)}")
    return kinds[0], found[0].name


def _describe(named: tuple[str, str]) -> str:
    kind, name = named
    found, cls = Registry().find(kind, name), Registry().load(kind, name)
    parts = [f"{kind}.{name}  ({found.distribution} {found.version}, {found.target})"]
    parts.append(inspect.getdoc(cls) or "")
    parts.append(f"capabilities: {', '.join(sorted(cls.capabilities)) or 'none'}")
    if getattr(cls, "requires", None):
        parts.append(f"requires: {', '.join(sorted(cls.requires))}")
    parts.append(options_table(cls.Options) or "It has no options.")
    return "\n\n".join(parts)


plugins = Plugins()
