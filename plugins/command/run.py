"""`phloem run CONFIG|MODEL "prompt"`: one completion, printed as it is written."""

from __future__ import annotations

import argparse
import sys

from phloem.errors import RequestError

from ._sampling import add_constraints, add_sampling, print_stream, sampling
from ._target import add_target, open_engine


class Run:
    """Its arguments and what it does."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """The prompt may come from standard input."""
        add_target(parser)
        parser.add_argument("prompt", nargs="?", help="text to answer (default: read from standard input)")
        parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
        add_sampling(parser, max_tokens=256)
        add_constraints(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Raises ConfigError, ModelError, RequestError."""
        params = sampling(args)  # before the model is loaded: a wrong number should cost no wait
        text: str = sys.stdin.read() if args.prompt is None else args.prompt
        if not text:
            raise RequestError("the prompt is empty", hint='phloem run MODEL "prompt", or pipe it in')
        with open_engine(args.target, args.sets) as engine:
            raw = args.raw or engine.core.tokenizer_data.chat_template is None
            prompt = text if raw else engine.tokenizer.chat([{"role": "user", "content": text}])
            print_stream(engine, prompt, params)
        return 0


run = Run()
