"""`phloem config`: what a configuration resolves to and why, whether it is right, and what may be written at all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from phloem.config import Config, plugin_sections
from phloem.config_yaml import KeyPath, dotted
from phloem.registry import AUTO

from ._reference import reference, schema
from ._target import add_target, is_file, load_target


class ConfigCommand:
    """Its arguments and what they do."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Each action takes CONFIG|MODEL and `--set`, except the two that describe."""
        actions = parser.add_subparsers(dest="action", metavar="show|check|schema|reference", required=True)
        for name, text in (("show", "every resolved value, and where it comes from"), ("check", "say what is wrong")):
            action = actions.add_parser(name, help=text)
            add_target(action, optional=True)
        actions.add_parser("schema", help="JSON schema of configuration files, over all installed plugins")
        actions.add_parser("reference", help="Markdown table of all options")

    def run(self, args: argparse.Namespace) -> int:
        """A wrong configuration is a ConfigError, which the program prints with exit code 2."""
        if args.action == "schema":
            document, problems = schema()
            print(json.dumps(document, indent=2))
            for problem in problems:
                print(f"left out: {problem}", file=sys.stderr)
        elif args.action == "reference":
            print(reference(), end="")
        else:
            config = load_target(args.target, sets=args.sets)
            model = args.target if args.target and not is_file(args.target) else None
            right = f"{model}, taken as a model, with the defaults: right" if model else "the configuration is right"
            print("\n".join(show(config)) if args.action == "show" else "\n".join([right, *left_open(config)]))
        return 0


def left_open(config: Config) -> Iterator[str]:
    """A line for each plugin that is chosen when the model is loaded, or known."""
    for path, kind, section in plugin_sections(config):
        if section.use == "auto":
            yield f"{dotted(path)}: auto, of {', '.join(AUTO[kind])} the first that suits"


def show(config: Config) -> Iterator[str]:
    """The resolved configuration as YAML, with a comment per value that says which layer set it."""
    data = config.dump()
    width = max(len(line) for line, _ in _lines(data, ())) + 2
    for line, path in _lines(data, ()):
        if path is None:
            yield line
            continue
        name, mark = config.origin(path)
        yield f"{line.ljust(width)}# {mark.place if mark else name}"


def _lines(value: Any, path: KeyPath) -> Iterator[tuple[str, KeyPath | None]]:
    """Lines of YAML, each with the path of the value it shows; None for lines that only open a block."""
    indent = "  " * len(path)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        here, prefix = (*path, key), f"{indent}{key}:" if isinstance(value, dict) else f"{indent}-"
        if (isinstance(item, dict) and item) or (isinstance(item, list) and item and isinstance(item[0], dict)):
            yield prefix, None
            yield from _lines(item, here)
        else:
            text = yaml.safe_dump(item, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
            yield f"{prefix} {text}", here


config = ConfigCommand()
