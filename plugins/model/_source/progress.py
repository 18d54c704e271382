"""A progress bar on a terminal, one plain line elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Counts up to `total`: with rich on a terminal, else a line at the start and one at the end; mute if disabled."""

    def __init__(self, label: str, *, total: int, enabled: bool, unit: str = "items") -> None:
        """`unit` is "items" or "bytes"; everything goes to standard error."""
        self.label, self.total, self.enabled = label, total, enabled
        self._rich: RichProgress | None = None
        if enabled and sys.stderr.isatty():
            amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
            self._rich = RichProgress(*columns, console=Console(stderr=True))

    def __enter__(self) -> Progress:
        if self._rich is not None:
            self._rich.start()
            self._task = self._rich.add_task(self.label, total=self.total)
        elif self.enabled:
            print(f"{self.label} ...", file=sys.stderr, flush=True)
        return self

    def update(self, done: int) -> None:
        """So many items or bytes are done."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self.enabled and kind is None:
            print(f"{self.label}: done", file=sys.stderr, flush=True)
