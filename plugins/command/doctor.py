"""`phloem doctor`: will it run here, how well, and what to do where not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from phloem.config import load_config, plugin_sections
from phloem.errors import ConfigError
from phloem.registry import AUTO

from ._checks import (
    Check,
    check_compiler,
    check_memory,
    check_plugins,
    check_port,
    check_python,
    check_torch,
)
from ._target import add_target, load_target

SIGNS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


class Doctor:
    """Its arguments and what it does."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """With a target, its model and plugins are checked; without, the defaults'."""
        add_target(parser, optional=True)
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: argparse.Namespace) -> int:
        """1 if anything fails."""
        checks = list(examine(args.target, args.sets))
        if args.json:
            print(json.dumps([asdict(check) for check in checks], indent=2))
        else:
            for check in checks:
                print(f"{SIGNS[check.status]}  {check.name}: {check.detail}")
                if check.remedy:
                    print(f"        -> {check.remedy}")
        return int(any(check.status == "fail" for check in checks))


def examine(target: str | None, sets: list[str]) -> Iterator[Check]:
    """All checks. A wrong configuration is one of the findings, and the rest goes by the defaults."""
    try:
        config = load_target(target, sets=sets)
    except ConfigError as error:
        for problem in error.problems:
            yield Check("config", "fail", problem)
        config = load_config(env={})
    else:
        yield Check("config", "ok", target or "defaults")
    chosen = {(kind, section.use) for _, kind, section in plugin_sections(config)}
    chosen |= {(kind, AUTO[kind][0]) for kind, use in list(chosen) if use == "auto"}
    yield from check_python()
    yield from check_torch()
    yield from check_compiler()
    yield from check_memory(config)
    yield from check_port(config)
    yield from check_plugins(chosen)


doctor = Doctor()
