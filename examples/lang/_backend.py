"""Where the examples run: an engine in this process, or a phloem server if --url is given."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import phloem.lang as pl


@contextmanager
def chosen_backend() -> Iterator[None]:
    """Read the command line and make what it says the default backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m", help="for an engine in this process")
    parser.add_argument("--url", help="of a running server, such as http://127.0.0.1:30000")
    options = parser.parse_args()
    if options.url:
        pl.set_default_backend(pl.RuntimeEndpoint(options.url))
        yield
        return
    with pl.Engine(options.model) as engine:
        pl.set_default_backend(engine)
        yield
