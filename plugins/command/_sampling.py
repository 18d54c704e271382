"""Sampling parameters as command-line arguments, and printing a stream as it comes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from phloem import Engine, SamplingParams
from phloem.results import Result

_ARGUMENTS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to write"),
    "temperature": (float, "0 is greedy (default: 1)"),
    "top_p": (float, "keep the smallest set of tokens with this probability"),
    "top_k": (int, "keep this many tokens"),
    "min_p": (float, "drop tokens below this share of the best one's probability"),
    "seed": (int, "repeatable noise"),
}


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """One option per parameter."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _ARGUMENTS.items():
        default = max_tokens if name == "max_tokens" else None
        suffix = f" (default: {default})" if default else ""
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text + suffix)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def add_constraints(parser: argparse.ArgumentParser) -> None:
    """What the whole answer must follow: one of these."""
    group = parser.add_argument_group("constraint").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=_schema, metavar="FILE|TEXT", help="JSON that is valid under this schema")
    group.add_argument("--regex", metavar="PATTERN", help="text that matches, from its beginning to its end")
    group.add_argument("--choices", type=lambda text: text.split(","), metavar="A,B", help="one of these texts")


def _schema(text: str) -> Any:
    """A schema as it stands, or the file that has it; a usage error says what is wrong."""
    inline = text.lstrip()[:1] in ("{", "")
    try:
        return json.loads(text if inline else Path(text).expanduser().read_text())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the file {text} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{'it' if inline else text} is not JSON: {error}") from None


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The parameters given; RequestError names a wrong one."""
    names = (*_ARGUMENTS, "stop", "json_schema", "regex", "choices")
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    return SamplingParams(**given)


def print_stream(engine: Engine, prompt: str | list[int], params: SamplingParams) -> tuple[str, Result | None]:
    """Print text as it is written; returns all of it, and the last delta, whose usage is the call's."""
    text, last = "", None
    for last in engine.stream(prompt, params):
        print(last.text, end="", flush=True)
        text += last.text
    print()
    return text, last
