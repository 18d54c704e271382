"""`phloem chat CONFIG|MODEL`: a conversation in the terminal. Earlier turns stay in the cache."""

from __future__ import annotations

import argparse
import sys

from phloem import Engine, SamplingParams
from phloem.errors import ModelError, RequestError

from ._sampling import add_sampling, print_stream, sampling
from ._target import add_target, open_engine

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D leaves"


class Chat:
    """Its arguments and what it does."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Sampling options hold for every turn."""
        add_target(parser)
        parser.add_argument("--system", help="system message")
        add_sampling(parser, max_tokens=1024)

    def run(self, args: argparse.Namespace) -> int:
        """Until end of input. Raises ConfigError, ModelError, RequestError."""
        params = sampling(args)
        if sys.stdin.isatty():
            import readline  # noqa: F401  (line editing and history for input())
        with open_engine(args.target, args.sets) as engine:
            if engine.core.tokenizer_data.chat_template is None:
                raise ModelError(f"{args.target} has no chat template", hint="phloem run --raw continues plain text")
            print(f"{engine.core.info.model_name}: {HELP}")
            return converse(engine, params, args.system)


def converse(engine: Engine, params: SamplingParams, system: str | None) -> int:
    """Read a line, answer it, until end of input. Ctrl-C stops an answer, not the conversation."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/system "):
            opening = [{"role": "system", "content": line.removeprefix("/system ")}]
            messages = list(opening)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            _turn(engine, params, messages, line)


def _turn(engine: Engine, params: SamplingParams, messages: list[dict[str, str]], line: str) -> None:
    """Answer one line; `messages` grows by the question and the answer, or not at all."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        text, last = print_stream(engine, engine.tokenizer.chat(asked), params)
    except RequestError as error:
        print(f"{error}\n(/reset starts a new conversation)")
        return
    except KeyboardInterrupt:
        print("\n(stopped)")
        return
    messages[:] = [*asked, {"role": "assistant", "content": text}]
    if last is not None:
        u = last.usage
        print(f"[{u.prompt_tokens} tokens read, {u.cached_tokens} of them cached, {u.completion_tokens} written]")


chat = Chat()
