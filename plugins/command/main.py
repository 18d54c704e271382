"""The command line: finds commands by entry-point metadata and imports only the one that is called.

A command (group `phloem.commands`) is an object with `configure(parser)`, which adds its arguments, and
`run(args) -> int`, which returns the exit code. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration,
130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Protocol

from phloem.errors import ConfigError, PhloemError, PluginError
from phloem.registry import Registry, did_you_mean

# Summaries of the built-in commands, so that help needs no import; third parties' commands show their distribution.
_HELP = {
    "Serve and generate": {
        "serve": "answer over HTTP: phloem serve CONFIG|MODEL",
        "run": 'print one completion: phloem run MODEL "prompt"',
        "chat": "talk to a model in the terminal",
        "bench": "measure an engine on the workloads of the documentation",
    },
    "Train": {
        "train-drafter": "a head that drafts for a model, from texts that the model writes itself",
    },
    "Inspect": {
        "plugins": "list, show, check and create plugins",
        "config": "show, check and describe configurations",
        "doctor": "check this machine: Python, torch, compiler, memory, port, plugins",
    },
}


class Command(Protocol):
    """What an entry point of the group `phloem.commands` resolves to."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; returns the exit code. A PhloemError is printed as one message."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `phloem` program; `argv` without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    registry = Registry()
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_help(registry), flush=True)
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"phloem {metadata.version('phloem')}")
            return 0
        return _run(registry, arguments[0], arguments[1:])
    except PhloemError as error:
        if debug:
            raise
        print(f"phloem {arguments[0]}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PluginError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: nothing to tell it
        sys.stderr.close()
        return 1


def _run(registry: Registry, name: str, arguments: list[str]) -> int:
    if name not in registry.names("commands"):
        raise ConfigError(f"there is no command '{name}' {did_you_mean(name, registry.names('commands'))}")
    command: Command = registry.resolve("commands", name)
    summary = next((group[name] for group in _HELP.values() if name in group), None)
    parser = argparse.ArgumentParser(f"phloem {name}", description=summary)
    parser.epilog = "--debug shows debug messages, and the traceback of an error."
    command.configure(parser)
    return command.run(parser.parse_args(arguments))


def _help(registry: Registry) -> str:
    installed = {found.name: found.distribution for found in registry.found("commands")}
    groups = {title: {n: text for n, text in group.items() if n in installed} for title, group in _HELP.items()}
    others = {n: f"from {dist}" for n, dist in installed.items() if not any(n in group for group in _HELP.values())}
    lines = ["usage: phloem COMMAND [...]", "", "Serves language models; every contested decision is a plugin."]
    for title, group in {**groups, "From other distributions": others}.items():
        if group:
            lines += ["", f"{title}:"] + [f"  {name:<13} {text}" for name, text in group.items()]
    lines += ["", "phloem COMMAND --help shows its arguments; --debug, debug messages and tracebacks; --version."]
    return "\n".join(lines)
