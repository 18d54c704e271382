"""Plain aligned columns for terminals and pipes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; the last one is cut to the terminal's width."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    room = max(20, shutil.get_terminal_size((120, 24)).columns - sum(widths) - 2 * len(widths))
    lines = []
    for row in [header, *rows]:
        last = row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"
        lines.append("  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), last]).rstrip())
    return "\n".join(lines)
