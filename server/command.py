"""The command `phloem serve CONFIG|MODEL`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.errors import PluginError

if TYPE_CHECKING:
    from phloem.config import Config

REQUIRED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}


class Serve:
    """Loads the configuration and runs a server; heavy imports happen only then."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "target",
            nargs="?",
            metavar="CONFIG|MODEL",
            help="a YAML file, or a model: known name, folder, GGUF, hub id",
        )
        parser.add_argument(
            "--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="may be repeated"
        )
        parser.add_argument("--host", help="address to listen on (server.host)")
        parser.add_argument("--port", type=int, help="port to listen on (server.port); 0 takes a free one")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until a signal; 0 after a clean end. Raises ConfigError, PluginError.

        The model process begins at once: it imports torch while this one reads the configuration and builds its routes.
        """
        try:
            from .model_process import spawn

            with asyncio.Runner() as runner:
                process = runner.run(spawn())
                try:
                    config = read_config(args)
                    from .serve import Server

                    return runner.run(Server(config, process).run())
                finally:
                    if process.returncode is None:
                        process.kill()
                        runner.run(process.wait())
        except ModuleNotFoundError as error:
            package = REQUIRED.get((error.name or "").partition(".")[0])
            if package is None:
                raise
            raise PluginError(f"phloem serve needs {package}", hint="pip install 'phloem[server]'") from error


def read_config(args: argparse.Namespace) -> Config:
    """The configuration of the command line: its flags are `--set`s under shorter names, given first."""
    from phloem.config import load_config

    sets = [f"server.{name}={value}" for name in ("host", "port") if (value := getattr(args, name)) is not None]
    target: str | None = args.target
    if target is not None and target.endswith((".yaml", ".yml")) and not Path(target).is_dir():
        return load_config(target, sets=[*sets, *args.sets])
    sections = {} if target is None else {"model": {"path": target}}
    return load_config(sections=sections, sets=[*sets, *args.sets])


serve = Serve()
