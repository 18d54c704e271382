"""CONFIG|MODEL on a command line, and the engine it means."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from phloem import Engine
from phloem.config_layers import set_layer
from phloem.errors import ConfigError


def add_target(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The positional argument and `--set`."""
    text = "a YAML file, or a model: a known name, a folder, a GGUF file, a hub id"
    parser.add_argument("target", metavar="CONFIG|MODEL", nargs="?" if optional else None, help=text)
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="may be repeated"
    )


def open_engine(target: str, sets: Sequence[str]) -> Engine:
    """An engine for the target; loads the model."""
    if target.endswith((".yaml", ".yml")):
        return Engine.from_yaml(target, sets=sets)
    problems: list[str] = []
    layer = set_layer(sets, problems)
    if problems:
        raise ConfigError(problems)
    return Engine(target, **layer.data)
