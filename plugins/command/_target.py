"""CONFIG|MODEL on a command line, and the engine it means."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from phloem import Engine
from phloem.config import Config, load_config


def add_target(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The positional argument and `--set`."""
    text = "a YAML file, or a model: a known name, a folder, a GGUF file, a hub id"
    parser.add_argument("target", metavar="CONFIG|MODEL", nargs="?" if optional else None, help=text)
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="may be repeated"
    )


def is_file(target: str) -> bool:
    """Whether a target is a configuration, and not a model."""
    return target.endswith((".yaml", ".yml"))


def load_target(target: str | None, *, sets: Sequence[str] = ()) -> Config:
    """What commands take as CONFIG|MODEL: a YAML file, or a model with the defaults; None is all defaults."""
    if target is None or is_file(target):
        return load_config(target, sets=sets)
    return load_config(sections={"model": {"path": target}}, sets=sets)


def open_engine(target: str, sets: Sequence[str]) -> Engine:
    """An engine for the target; loads the model."""
    return Engine.from_config(load_target(target, sets=sets))
