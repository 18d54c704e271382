"""A progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_EVERY_S = 30.0


class Report:
    """How far something is, on standard error. Use as a context manager."""

    def __init__(self, label: str) -> None:
        self._label, self._last = label, 0.0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))

    def __enter__(self) -> Report:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=1.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, part: float, note: str) -> None:
        """`part` of 1 is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=part, description=f"{self._label}: {note}")
        elif time.monotonic() - self._last > _EVERY_S or part >= 1.0:
            self._last = time.monotonic()
            self.line(f"{self._label}: {100 * part:.0f} %, {note}")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
