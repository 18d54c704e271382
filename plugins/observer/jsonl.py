"""Writes one JSON line per step and per finished request."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import TextIOBase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from phloem.batch import StepStats
from phloem.errors import PluginError
from phloem.hooks import RequestSummary, hookimpl
from phloem.interfaces import PluginContext, ServiceInfo


class JsonlObserver:
    """Appends to a file: `{"event": "step", ...}` and `{"event": "request", ...}`, times in seconds."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `observers: [{use: jsonl}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        path: str = "steps.jsonl"
        """File to append to; its folder must exist."""
        steps: bool = True
        """Write a line per step."""
        requests: bool = True
        """Write a line per finished request."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        self._options = options
        self._file: TextIOBase | None = None
        folder = Path(options.path).expanduser().parent
        if not folder.is_dir():
            raise PluginError(f"observer 'jsonl': there is no folder {folder}", hint="create it, or change `path`")

    @hookimpl
    def start(self, info: ServiceInfo) -> None:
        """Open the file."""
        self._file = Path(self._options.path).expanduser().open("a", encoding="utf-8")
        self._write("start", {"model": info.model_name})

    @hookimpl
    def step(self, stats: StepStats) -> None:
        """A line; buffered, since a step must not wait for a disk."""
        if self._options.steps:
            self._write("step", asdict(stats) | {"host_s": stats.host_s})

    @hookimpl
    def request(self, summary: RequestSummary) -> None:
        """A line, and everything so far becomes readable."""
        if self._options.requests:
            self._write("request", asdict(summary))
        if self._file is not None:
            self._file.flush()

    @hookimpl
    def stop(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
